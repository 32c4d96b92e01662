"""Decides how the KV of a prompt's documents is used again.

Public: `asked.AskedBeginnings`, `order.best_order`, `blend.Blend`, `blend.decide`, `auto.Controller`,
`gate.read_gate`.
Imported by the engine and what schedules. Policy only but for `layer_filter.py`: no tensors.
"""
