"""Wire formats: what request bodies may say, one pydantic module per vendor's API. No HTTP, no engine, no Ray.

Public: `openai` (chat and text completions, sessions, KV). `cluster/http/` turns them into requests.
"""
