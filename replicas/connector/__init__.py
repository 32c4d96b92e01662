"""An engine's use of the cache tier, under the field's word: what is asked for, loaded into pages, and saved.

Public: `connector.KvConnector`; `step_load.ChunkLoader` and `save.ChunkSaver`, which the runner
calls as it computes. Imports `forest` and the cache tier's store; the engine and the runner import it. AttentionStore
3.2: layer-wise loading and saving beside the computation.
"""
