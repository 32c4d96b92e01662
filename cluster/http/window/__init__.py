"""Shows people what runs and what is kept: lists, events, and the page that draws them.

Public: `requests.RequestLog`, `overview`, `page`. `http.api` and `http.api_state` import it.
"""
