"""The life of a local cluster: what is checked before it starts, Ray's environment, signals, and what ends it.

Public: `local_cluster.LocalCluster`. Imported by the command line and tests.
"""
