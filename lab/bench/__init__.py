"""The load tool behind `mneme bench`: what is sent when, how answers are timed, and what comes of it.

`workloads` and `measure` are policy without clock or network; `load` plays sessions on an event loop's time; `client`
speaks HTTP; `report` draws. Any OpenAI-compatible server can be measured: nothing of this one is asked for. Only
`autoscale`, load that rises and falls, is about this one's replicas, which its metrics say.

Public: `workloads`, `traffic.SessionPlayer`, `client.ChatClient`, `measure`, `html_report.html_report`, `command`.
Benchmarks send their load with it, too.
"""
