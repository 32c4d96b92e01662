"""Decides who runs in the next step, with how many tokens, and who waits or is suspended. No tensors.

Public: `scheduler.Scheduler`, `queue.WaitingQueue`, `gathering.Gathering`. Imports `forest`; the engine imports it.
Chunked prefill as in Sarathi-Serve; suspension as in Pensieve 4.4; truncation as in AttentionStore 3.4.
"""
