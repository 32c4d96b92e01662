"""The OpenAI-style HTTP API: requests checked, answers written, one module per kind of route. No Ray.

Public: `api` (the application). Imports `wire`, `metrics` and the interface in `serve.engine_client`.
"""
