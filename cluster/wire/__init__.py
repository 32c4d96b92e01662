"""Wire formats: what request bodies may say, one pydantic module per vendor's API. No HTTP, no engine, no Ray.

Public: `openai` (chat and text completions, embeddings, sessions, KV), `responses`
(OpenAI's Responses API), `anthropic` (Messages). `cluster/http/` turns them into requests.
"""
