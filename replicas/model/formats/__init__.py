"""Formats of weights beside plain safetensors: GGUF files, and quantized checkpoints, read to the engine's dtype.

Public: `gguf_file.GgufFile`, `gguf_file.card_of`, `quantized.QuantizedTensors`. `weights` and `config` import it.
"""
