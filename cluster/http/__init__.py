"""The OpenAI-style HTTP API: requests checked, answers written, one module per kind of route. No Ray.

Public: `api` (the application), `protocol`. Imports `metrics` and the interface in `serve.engine_client`.
"""
