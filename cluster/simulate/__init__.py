"""Plays traces against a whole cluster, as discrete events: routers, replicas' steps, caches and clients.

Public: `play.Simulation`, `routers.Router`, `scenarios.Scenario`, `workload.read_workload`. The command line imports
them. No Ray, no tensors. Wherever it needs no device, the code that serves is what is simulated: the router's chooser,
the node's index and its policies, the load controller, the cost model, the autoscaler, and with `exact` the scheduler
over its forest.
"""
