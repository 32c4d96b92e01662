"""Decides how the KV of a prompt's documents is used again.

Public: `order.best_order`. Imported by the engine. Policy only: no tensors.
"""
