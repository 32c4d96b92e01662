"""The backend in plain PyTorch: it serves where nothing compiled does, and is a second opinion on the others.

Public: `backend`, `fp8`, `ops`. Imports the kernels' root; `attention` and `ops` import it, and models `fp8`.
"""
