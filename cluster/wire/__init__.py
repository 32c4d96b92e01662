"""Wire formats: what request bodies may say, one pydantic module per vendor's API, and what answers are. No HTTP, no
engine, no Ray.

Public: `openai` (chat and text completions, embeddings, sessions, KV), `responses`
(OpenAI's Responses API), `anthropic` (Messages), `answers` (of all of them). `cluster/http/` turns bodies into
requests, and events into answers.
"""
