"""The backend in plain PyTorch: runs anywhere, and is what the others are compared with.

Public: `backend`, `ops`. Imports the kernels' root; `attention` and `ops` import it.
"""
