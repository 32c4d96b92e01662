"""Shows people what runs and what is kept: lists, events, and the page that draws them.

Public: `requests.RequestLog`, `ended`, `overview`, `page`. `http.api` imports it, `http.api_state` the log.
"""
