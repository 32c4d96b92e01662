"""The model: configuration, weights, the decoder's forward pass, CUDA graphs of it, and sampling. Owns the tensors.

Public: `runner.Runner`, `draws`, `directory`, `weights`, `sampler`. Imports `kernels`; the engine imports it.
RelayAttention 3 and ChunkAttention 3.2 live below it, in `kernels`.
"""
