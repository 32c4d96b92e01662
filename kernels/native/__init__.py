"""The CPU backend: C++ compiled at first use, one Python module per operation, and one for whole layers.

Public: `backend`, `layers`, `library`. Imports the kernels' root; `attention`, `linear`, `kv_write`, `ops` import it,
and the decoder `layers`.
"""
