"""Plays traces through the cache's policies with made-up costs: capacity planning without a model.

Public: `simulator`, `traces`, `synthetic`, `costs`, `command`. `lab.bench`, `lab.cluster` and benchmarks import it.
AttentionStore 4 (its figures), Pensieve 6 (its workloads).
"""
