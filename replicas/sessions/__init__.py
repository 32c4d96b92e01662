"""Conversations: their token ids, the turns that wait for each other, and the logs that let them outlive a replica.

Public: `sessions.Sessions`, `token_log.TokenLog`, `durable.DurableSessions`. Imports `forest` and
`cachetier.session_log`; the engine imports it. Pensieve 3 (stateful serving).
"""
