"""Decides who is evicted, what loading and saving cost, and whether loading beats computing. The only I/O is a file.

Engines, a node's cache and the simulator share this code. Public: `eviction`, `cost_model`, `load_controller`.
Imports `chunk` and the root. AttentionStore 3.3 (look-ahead), Pensieve 4.3 (retention value).
"""
