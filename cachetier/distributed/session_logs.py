"""Session logs of a Ray cluster as an engine's process sees them; its node's actor keeps them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mneme.cachetier.distributed.node_logs import LogRead
from mneme.cachetier.distributed.peers import Peers
from mneme.cachetier.sessions.store import Appended, LogKey

_logger = logging.getLogger(__name__)

READ_S, APPEND_S, DELETE_S = 0.15, 0.5, 3.0  # how long an engine's process waits for its node's actor
DELETE_OWNED_S = 5.0  # each session of a tenant gets a tombstone
_PEER_SHARE = 0.8  # of that time, for answers of peers


class RaySessionLogs:
    """A `SessionLogStore` in an engine's process. `connect` gives the actor of its node, made if there is none."""

    def __init__(self, node_id: str, connect: Callable[[], Any]) -> None:
        self._node_id, self._connect = node_id, connect
        self._node = connect()
        self._calls = Peers(lambda _node: self._lost())
        self._reconnecting = threading.Lock()

    def append(self, key: LogKey, records: Sequence[bytes]) -> Appended:
        outcome = self._ask("append_log", key, list(records), timeout_s=APPEND_S)
        return Appended.FAILED if outcome is None else Appended(outcome)

    def read(self, key: LogKey, newer_than: int = 0) -> list[bytes] | None:
        read: LogRead | None = self._ask("read_log", key, newer_than, READ_S * _PEER_SHARE, timeout_s=READ_S)
        if read is None or not read.is_sure:
            raise TimeoutError("not all nodes that may have a session's log have answered")
        return read.records

    def delete(self, key: LogKey, at_least: int = 0) -> bool:
        was_there: bool | None = self._ask("delete_log", key, at_least, DELETE_S * _PEER_SHARE / 2, timeout_s=DELETE_S)
        if was_there is None:
            raise TimeoutError("not all nodes that may have a session's log have answered")
        return was_there

    def delete_owned(self, owner: bytes) -> int:
        timeout_s = DELETE_OWNED_S * _PEER_SHARE
        num_deleted: int | None = self._ask("delete_owned_logs", owner, timeout_s, timeout_s=DELETE_OWNED_S)
        if num_deleted is None:
            raise TimeoutError("not all nodes that may have a tenant's logs have answered")
        return num_deleted

    def close(self) -> None:
        """The node's actor stays."""

    def stats(self) -> dict[str, int]:
        return dict(self._calls.counters)

    def _ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        call = self._calls.call(self._node_id, method, getattr(self._node, method), *args)
        return self._calls.answers([call], time.monotonic() + timeout_s)[0]

    def _lost(self) -> None:
        """The actor is dead for good."""
        if self._reconnecting.acquire(blocking=False):
            threading.Thread(target=self._reconnect, name="session-logs-reconnect", daemon=True).start()

    def _reconnect(self) -> None:
        try:
            self._node = self._connect()
        except Exception:  # the thread's edge; the next call that fails begins another
            _logger.exception("session logs: the node's actor could not be made again")
        finally:
            self._reconnecting.release()
