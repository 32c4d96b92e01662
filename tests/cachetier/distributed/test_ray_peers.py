"""Calls to nodes that miss their deadlines; without Ray."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from mneme.cachetier.distributed import peers as ray_peers
from mneme.cachetier.distributed.peers import Peers

WAIT_S = 30.0


def test_late_answers_are_let_go_of_though_nobody_calls_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They name objects of chunks, which stay in memory as long as that."""
    looked_at: list[object] = []
    all_were = threading.Event()

    def get(answer: object, timeout: float) -> object:
        raise GetTimeoutError

    def wait(answers: list[object], timeout: float) -> Any:
        looked_at.extend(answers)
        if len(looked_at) == 3:
            all_were.set()
        return answers, []

    monkeypatch.setattr(ray_peers, "ray", SimpleNamespace(get=get, wait=wait, is_initialized=lambda: True))
    monkeypatch.setattr(ray_peers, "_LATE_S", 0.01)
    peers = Peers(lambda node: None)
    calls = [peers.call("n", "locate", SimpleNamespace(remote=lambda each=each: each)) for each in range(3)]
    assert peers.answers(calls, 0.0) == [None] * 3
    assert all_were.wait(WAIT_S)
    assert looked_at == [0, 1, 2]
    assert not peers._late
    assert peers.is_up("n")
