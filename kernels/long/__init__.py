"""A library's attention, by way of torch, for what it does best: cuDNN's on a GPU, torch's own on a CPU.

Public: `backend`. Imports the kernels' root; `attention` imports it.
"""
