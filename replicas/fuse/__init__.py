"""Decides how the KV of a prompt's documents is used again.

Public: `order.best_order`, `blend.Blend`. Imported by the engine and what schedules. Policy only: no tensors.
"""
