"""Says what is measured: families of the cluster and of the cache tier, and latencies as clients see them.

Public: `exposition`, `families`, `latency`. Imports the interface in `serve.engine_client`.
"""
