"""Where an ingress last sent each session, and which replica's answer about one counts."""

from __future__ import annotations

from collections import OrderedDict

from mneme.replicas.sessions.sessions import SessionKey

MAX_HOMES = 50_000


class SessionHomes:
    """Replica ids by session, bounded; the least recently used is forgotten first."""

    def __init__(self) -> None:
        self._homes: OrderedDict[SessionKey, str] = OrderedDict()
        self._forks: OrderedDict[SessionKey, str] = OrderedDict()  # that have had no turn yet

    def move(self, key: SessionKey, replica_id: str) -> str | None:
        """The session has a turn on this replica; returns the one it leaves, if it leaves one."""
        left = self._homes.get(key)
        self._forks.pop(key, None)
        _put(self._homes, key, replica_id)
        return None if left == replica_id else left

    def note_fork(self, key: SessionKey, replica_id: str) -> None:
        _put(self._forks, key, replica_id)
        _put(self._homes, key, replica_id)

    def fork_home(self, key: SessionKey) -> str | None:
        """The replica where a session was made that has had no turn yet."""
        return self._forks.get(key)


def _put(homes: OrderedDict[SessionKey, str], key: SessionKey, replica_id: str) -> None:
    homes[key] = replica_id
    homes.move_to_end(key)
    if len(homes) > MAX_HOMES:
        homes.popitem(last=False)
