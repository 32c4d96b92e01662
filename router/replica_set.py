"""Tells which replicas of a deployment this process may call: the Serve router publishes, the ingress listens.

Ray copies the router's class by value into every process that owns a handle, its module included; this module
is imported by name instead, so both sides meet in one place. Thread-safe: the router may run on a loop of its
own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Listener = Callable[[frozenset[str]], None]

_lock = threading.Lock()
_replicas: dict[str, frozenset[str]] = {}
_listeners: dict[str, list[Listener]] = {}


def publish(deployment: str, replica_ids: frozenset[str]) -> None:
    """Tell every listener of `deployment`, on the calling thread, unless nothing has changed."""
    with _lock:
        if _replicas.get(deployment) == replica_ids:
            return
        _replicas[deployment] = replica_ids
        listeners = list(_listeners.get(deployment, ()))
    for listener in listeners:
        listener(replica_ids)


def listen(deployment: str, listener: Listener) -> None:
    """Call `listener` with the replicas known now, if any, and at every change, on the publisher's thread."""
    with _lock:
        _listeners.setdefault(deployment, []).append(listener)
        known = _replicas.get(deployment)
    if known is not None:
        listener(known)
