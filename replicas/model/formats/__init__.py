"""Formats of weights beside plain safetensors: GGUF files and quantized checkpoints, and what rounding to 4 bits asks.

Public: `gguf_file.GgufFile`, `gguf_file.card_of`, `observed.observe`, `quantized.QuantizedTensors`.
`weights` and `config` import it.
"""
