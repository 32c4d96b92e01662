"""Plays pods of the rendered chart on one machine: `namespaces.Pods`, and `load.Load` on their doors.

Public: `namespaces.Pods`, `load.Load`. `bench_pods.py` imports both.
"""
