"""The prefix cache: pages of all live and finished sequences as one forest, shared token by token. No tensors.

Public: `forest.PrefixForest`, `tree`, `paths`. Imports `cachetier.policy`; `schedule`, `sessions` and the engine
import it. ChunkAttention 3.1 (the prefix tree), Pensieve 4.3 (holes and tiers).
"""
