"""cuDNN's attention, by way of torch, for what it does best.

Public: `backend`. Imports the kernels' root; `attention` imports it.
"""
