"""Shows people what runs and what is kept, and what the API takes: lists, events, and the pages that draw them.

Public: `requests.RequestLog`, `ended`, `overview`, `page`, `docs.docs_page`.
`http.api` imports it, `http.api_state` the log.
"""
