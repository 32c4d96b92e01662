"""The log of a node's sessions: the token ids of each conversation, so that a turn survives its replica.

Public: `log_store.SessionLogStore`, `log.open_session_logs`, `rows`. Imports `chunk`; `distributed` and replicas import
it. AttentionStore 3.1 (sessions outlive the engine).
"""
