"""What is measured: families of the cluster and of the cache tier, and latencies as clients see them.

Public: `families`, `latency`. Imports nothing of this folder.
"""
