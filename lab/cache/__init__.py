"""Plays traces through the cache's policies with made-up costs: capacity planning without a model.

Public: `simulator`, `traces`, `synthetic`, `costs`. Imported by `mneme simulate` and benchmarks alone. AttentionStore
4 (its figures), Pensieve 6 (its workloads).
"""
