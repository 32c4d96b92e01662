"""Moves pages between a device pool and host memory of the same process: the host tier under an engine.

Public: `tier` (the interface), `cuda.make_tier`, `streams`. Imports `kernels` alone; replicas import it.
AttentionStore 3.2 and Pensieve 4.2: copies on streams of their own, beside the computation.
"""
