"""The CUDA backend in Triton; the only modules that import triton.

Public: `modules.triton_module`, by which the root imports the rest when a CUDA tensor first needs it. ChunkAttention
3.2 (two phases), RelayAttention 3.3 (fused merge).
"""
