"""Session logs on three nodes: a session goes on wherever its next turn runs, whoever dies, unless it was deleted."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import pytest

from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.cachetier.names import Appended
from mneme.cachetier.session_log.log_store import LogKey
from mneme.cachetier.session_log.rows import LogRows, SessionState, rows_of
from tests.cachetier.session_records import conversation, ids_of, key_number
from tests.e2e.nodes.cache_cluster import MARKS, CacheCluster, LogProcess, call, eventually, kill

pytestmark = MARKS

APPLICATION = "logs"
STEPS = conversation(6)


class Nodes:
    def __init__(self, cluster: CacheCluster) -> None:
        self.cluster = cluster
        self.config = CacheConfig(
            chunk_tokens=64, disk=DiskTierConfig(folder=str(cluster.folder / "logs-%n"), capacity_bytes=50 << 20)
        )
        self.engines = {name: self._engine(name) for name in ("head", "a", "goes")}

    def _engine(self, name: str) -> Any:
        made = self.cluster.begin(name, LogProcess, self.config, APPLICATION)
        call(made.append, key_number(99), rows_of(SessionState(version=1, ids=ids_of(1, 1))))
        return made

    def append(self, name: str, key: LogKey, rows: LogRows, state: SessionState) -> None:
        """As a replica does it, which tries again what failed."""
        outcome = call(self.engines[name].append, key, rows)
        if outcome is not Appended.WRITTEN:
            assert outcome in (Appended.NEEDS_WHOLE, Appended.FAILED)
            eventually(lambda: call(self.engines[name].append, key, rows_of(state)) is Appended.WRITTEN)

    def say(self, name: str, key: LogKey, first: int, last: int) -> SessionState:
        """Turns; the state behind them."""
        for rows, state in STEPS[2 * first : 2 * last]:
            self.append(name, key, rows, state)
        return STEPS[2 * last - 1][1]

    def read(self, name: str, key: LogKey) -> SessionState | None:
        def known() -> tuple[LogRows | None] | None:
            found = call(self.engines[name].read, key)
            return None if found == "unknown" else (found,)

        (rows,) = eventually(known)
        return None if rows is None else rows.state()

    def has(self, name: str, key: LogKey, state: SessionState) -> bool:
        return self.read(name, key) == state

    def have_copied(self) -> bool:
        """Whether no copy waits."""
        figures = [call(self.actor(name).stats)["session_logs"] for name in self.engines]
        return all(each["copies_waiting"] == 0 for each in figures)

    def num_copies(self, key: LogKey) -> int:
        """Nodes whose databases have the session."""
        found = 0
        for path in self.cluster.folder.glob("logs-*/mneme-sessions-*/sessions.db"):
            with closing(sqlite3.connect(path, isolation_level=None)) as database:
                found += len(database.execute("SELECT 1 FROM sessions WHERE name = ?", (key.name,)).fetchall())
        return found

    def actor(self, name: str) -> Any:
        return self.cluster.node_actor(name, APPLICATION)


@pytest.fixture(scope="module")
def nodes(cluster: CacheCluster) -> Nodes:
    cluster.add_node("goes")
    return Nodes(cluster)


def test_a_session_goes_on_on_any_node_and_has_one_copy(nodes: Nodes) -> None:
    key = key_number(1)
    state = nodes.say("a", key, 0, 2)
    assert all(nodes.read(name, key) == state for name in nodes.engines)
    eventually(lambda: nodes.num_copies(key) == 2)
    state = nodes.say("goes", key, 2, 3)
    assert all(nodes.read(name, key) == state for name in nodes.engines)
    state = nodes.say("head", key, 3, 6)
    assert all(nodes.read(name, key) == state for name in nodes.engines)
    assert call(nodes.engines["head"].append, key, STEPS[4][0]) is Appended.STALE
    call(nodes.engines["a"].append, key, STEPS[4][0])  # of a replica that does not know that it was left
    assert all(nodes.read(name, key) == state for name in nodes.engines)


def test_what_was_deleted_is_so_on_all_nodes_and_after_their_actors_died(nodes: Nodes) -> None:
    key = key_number(4)
    nodes.say("a", key, 0, 2)
    nodes.say("goes", key, 2, 3)
    eventually(lambda: nodes.num_copies(key) >= 2)
    assert eventually(lambda: call(nodes.engines["head"].delete, key)) is True
    for name in nodes.engines:
        kill(nodes.actor(name))
    for name in nodes.engines:
        gone = eventually(lambda name=name: nodes.read(name, key))
        assert gone is not None
        assert (len(gone.ids), gone.version > STEPS[5][1].version) == (0, True)
    assert call(nodes.engines["a"].append, key, STEPS[6][0]) is Appended.STALE
    assert call(nodes.engines["a"].append, key, rows_of(STEPS[7][1])) is Appended.STALE
    assert eventually(lambda: call(nodes.engines["goes"].delete, key) is False)


def test_a_node_that_is_gone_leaves_the_copies(nodes: Nodes) -> None:
    """The last test: a node goes for good."""
    states = {number: nodes.say("goes", key_number(number), 0, 1 + number % 4) for number in range(10, 22)}
    eventually(lambda: all(nodes.num_copies(key_number(number)) == 2 for number in states))
    eventually(nodes.have_copied)
    nodes.cluster.remove_node("goes")
    for number, state in states.items():
        name = ("head", "a")[number % 2]
        eventually(lambda name=name, number=number, state=state: nodes.has(name, key_number(number), state))
    state = nodes.say("a", key_number(12), 1, 3)
    assert nodes.read("head", key_number(12)) == state
