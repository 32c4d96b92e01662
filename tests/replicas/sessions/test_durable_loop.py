"""An engine's thread and the logs of its sessions: who waits for what, and what happens while a disk hangs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mneme.cachetier.names import Appended
from mneme.cachetier.session_log.log import SessionLogs
from mneme.cachetier.session_log.log_store import LogKey, log_key
from mneme.cachetier.session_log.rows import LogRows
from mneme.errors import ReplicaUnavailable
from mneme.replicas.engine.loop import EngineLoop
from mneme.replicas.queries import GetSession
from mneme.replicas.request import SamplingParams, StepMessage, TokenEvent
from mneme.replicas.sessions.durable import DurableSessions
from tests.replicas.fake_runner import continuation
from tests.replicas.schedule.test_engine_policy import make_engine, make_request

KEY = ("", "public:s")
LIMIT_S = 20.0


class GatedLogs(SessionLogs):
    """Stands still while its gate is closed, as a disk that hangs."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.gate = threading.Event()
        self.gate.set()

    def append(self, key: LogKey, rows: LogRows) -> Appended:
        assert self.gate.wait(LIMIT_S)
        return super().append(key, rows)

    def read(self, key: LogKey, newer_than: int = 0) -> LogRows | None:
        assert self.gate.wait(LIMIT_S)
        return super().read(key, newer_than)


class Client:
    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self.messages: queue.Queue[StepMessage] = queue.Queue()
        loop.subscribe("client", self.messages.put)
        self.events: list[TokenEvent] = []
        self.num_messages = 0

    def submit(self, name: str, ids: list[int], **more: Any) -> Any:
        request = make_request(
            f"{name}.0", ids, SamplingParams(temperature=0, max_tokens=4), subscriber="client", **more
        )
        (refusal,) = self.loop.submit_many([request])
        return refusal

    def until_end(self, name: str) -> list[int]:
        while not any(e.request_id == f"{name}.0" and e.finish_reason for e in self.events):
            message = self.messages.get(timeout=LIMIT_S)
            assert message.seq == self.num_messages
            self.num_messages += 1
            self.events += message.events
        return [token for e in self.events if e.request_id == f"{name}.0" for token in e.token_ids]


@contextmanager
def replica(logs: SessionLogs, *, read_s: float = LIMIT_S) -> Iterator[tuple[EngineLoop, Client]]:
    loop = EngineLoop(make_engine(durable=DurableSessions(logs, b"m", 5, read_s=read_s)))
    loop.start()
    try:
        yield loop, Client(loop)
    finally:
        loop.stop()


def test_the_end_of_a_turn_is_told_when_it_is_written(tmp_path: Path) -> None:
    logs = SessionLogs(str(tmp_path))
    with replica(logs) as (_, client):
        for number in range(20):
            client.submit(f"{number}", [1, 2, 3], session_id=f"public:{number}")
        for number in range(20):
            client.until_end(f"{number}")
            rows = logs.read(log_key(b"m", "", f"public:{number}"))
            assert rows.session.num_turns == 1


def test_a_disk_that_hangs_holds_nobody_up_for_long(tmp_path: Path) -> None:
    """Events come late, tokens in time; unknown sessions are not taken for sessions that do not exist."""
    logs = GatedLogs(str(tmp_path))
    with replica(logs, read_s=0.02) as (loop, client):
        assert client.submit("a", [1, 2, 3], session_id=KEY[1]) is None
        said = [1, 2, 3, *client.until_end("a")]
        logs.gate.clear()
        assert client.submit("b", [4], session_id=KEY[1], append=True) is None  # it is known here
        said += [4, *client.until_end("b")]
        assert isinstance(client.submit("c", [4], session_id="public:u", append=True), ReplicaUnavailable)
        assert isinstance(loop.query(GetSession(("", "public:u"), restores=True)), ReplicaUnavailable)
        assert client.submit("d", [1], session_id="public:v") is None
        assert client.until_end("d") == continuation([1], 4, 5)
        logs.gate.set()
    with replica(SessionLogs(str(tmp_path))) as (_, client):
        assert client.submit("e", [3], session_id=KEY[1], append=True) is None
        assert client.until_end("e") == continuation([*said, 3], 4, 5)


def test_events_of_requests_without_a_session_are_not_held_back(tmp_path: Path) -> None:
    logs = GatedLogs(str(tmp_path))
    logs.gate.clear()
    with replica(logs, read_s=0.01) as (_, client):
        assert client.submit("a", [1, 2], session_id=KEY[1]) is None
        assert client.submit("b", [1, 2]) is None
        client.until_end("b")
        client.until_end("a")
        logs.gate.set()
