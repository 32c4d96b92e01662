"""The experiments of the five papers, each a grid of points that are measured once and kept.

Public: `experiment.Experiment`, and `EXPERIMENTS` of each file; `bench_papers.py` imports them.
"""
