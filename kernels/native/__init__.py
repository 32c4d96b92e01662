"""The CPU backend: C++ compiled at first use, one Python module per operation.

Public: `backend`, `library`. Imports the kernels' root; `attention`, `linear`, `kv_write` and `ops` import it.
"""
