"""Plays traces against a whole cluster, as discrete events: routers, replicas' steps, caches and clients.

Public: `simulation.Simulation`, `routers`, `scenarios.Scenario`, `workload.read_workload`, `command`. Benchmarks and
`mneme simulate` import them. No Ray, no tensors. Wherever it needs no device, the code that serves is what is
simulated: the router's chooser, the scheduler over its prefix forest, the cost model, the autoscaler.
"""
