"""Session logs of several nodes: what is sure, where copies are, and faults of actors and folders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from mneme.cachetier.distributed import nodes as ray_nodes
from mneme.cachetier.distributed import session_logs as ray_session_logs
from mneme.cachetier.distributed.nodes import rendezvous
from mneme.cachetier.distributed.session_logs import LogRead
from mneme.cachetier.names import Appended
from mneme.cachetier.session_log.log_store import LogKey
from tests.cachetier.log_nodes import LogCluster, LogNode, eventually
from tests.cachetier.session_records import conversation, key_number

STEPS = conversation(6)
KEY = key_number(1)
READ_S = 0.3


@pytest.fixture
def play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Callable[[LogCluster], Awaitable[None]]], None]:
    """Nodes of these names, and what happens to them."""
    monkeypatch.setattr(ray_session_logs, "_COPY_S", 0.2)
    monkeypatch.setattr(ray_nodes, "_MEMBERS_S", 0.05)

    def play(names: str, scene: Callable[[LogCluster], Awaitable[None]]) -> None:
        async def run() -> None:
            cluster = LogCluster(tmp_path, names, monkeypatch)
            await cluster.start()
            try:
                async with asyncio.timeout(60):
                    await scene(cluster)
            finally:
                await cluster.close()

        asyncio.run(run())

    return play


async def say(node: LogNode, key: LogKey, first: int, last: int) -> None:
    """Turns."""
    for rows, _ in STEPS[2 * first : 2 * last]:
        assert await node.logs.append(key, rows) is Appended.WRITTEN


def num_turns(read: LogRead) -> int | None:
    """None: there is no session."""
    return None if read.rows is None else read.session.num_turns


async def turns_at(node: LogNode, key: LogKey) -> int | None:
    """Count the turns of the copy there."""
    return num_turns(await node.logs.read_here(key, 0))


def in_order(cluster: LogCluster, writer: str, key: LogKey) -> list[LogNode]:
    """Peers of a session's writer, the one that has the copy first."""
    return [cluster.nodes[name] for name in rendezvous(key.name, [name for name in cluster.nodes if name != writer])]


def test_an_actor_that_another_took_the_place_of_is_found(play) -> None:
    async def scene(cluster: LogCluster) -> None:
        one, two = cluster.nodes["a"], cluster.nodes["b"]
        await say(two, KEY, 0, 1)
        assert num_turns(await one.logs.read(KEY, 0, READ_S)) == 1
        await two.logs.close()
        await two.start()  # the folder is the same
        await say(two, KEY, 1, 2)
        await eventually(lambda: _turns(one, KEY, 2))
        assert await eventually(lambda: one.logs.delete(KEY, 0, READ_S))

    play("ab", scene)


async def _turns(node: LogNode, key: LogKey, num: int) -> bool:
    read = await node.logs.read(key, 0, READ_S)
    return read.is_sure and num_turns(read) == num


def test_a_read_is_sure_only_if_all_nodes_have_answered(play) -> None:
    """The copy may lack the last turn, and who wrote that may be any of them."""

    async def scene(cluster: LogCluster) -> None:
        writer = cluster.nodes["a"]
        reader = in_order(cluster, "a", KEY)[-1]
        await say(writer, KEY, 0, 1)
        await eventually(lambda: _has_copy(cluster, "a", KEY, 1))
        writer.hangs = True
        read = await reader.logs.read(KEY, 0, READ_S)
        assert (num_turns(read), read.is_sure) == (1, False)
        assert await reader.logs.read(key_number(2), 0, READ_S) == LogRead(None, False)
        writer.hangs = False
        assert (await reader.logs.read(KEY, 0, READ_S)).is_sure

    play("abcdefghijkl", scene)


async def _has_copy(cluster: LogCluster, writer: str, key: LogKey, num: int) -> bool:
    return await turns_at(in_order(cluster, writer, key)[0], key) == num


def test_nodes_whose_actor_is_gone_count_for_a_while(play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(cluster: LogCluster) -> None:
        one, two = cluster.nodes["a"], cluster.nodes["b"]
        assert (await one.logs.read(KEY, 0, READ_S)).is_sure
        del cluster.handles["b"]
        two.hangs = True
        since_s = time.monotonic()
        await eventually(lambda: _is_sure(one))
        assert time.monotonic() - since_s > 0.5

    monkeypatch.setattr(ray_nodes, "_BACK_S", 0.5)
    play("ab", scene)


async def _is_sure(node: LogNode) -> bool:
    return (await node.logs.read(KEY, 0, 0.05)).is_sure


def test_a_copy_that_its_peer_cannot_take_is_on_the_next(play) -> None:
    async def scene(cluster: LogCluster) -> None:
        first, second, _ = in_order(cluster, "a", KEY)
        first.open_logs = lambda: None
        await first.logs.close()
        await first.start()
        await say(cluster.nodes["a"], KEY, 0, 2)
        await eventually(lambda: _is_at(second, 2))

    play("abcd", scene)


async def _is_at(node: LogNode, num: int) -> bool:
    return await turns_at(node, KEY) == num


def test_a_copy_for_which_there_is_no_peer_yet_is_made_once_there_is_one(play) -> None:
    """Not of what was deleted meanwhile."""

    async def scene(cluster: LogCluster) -> None:
        writer, gone = cluster.nodes["a"], key_number(2)
        for key in (KEY, gone):
            await say(writer, key, 0, 2)
        await eventually(lambda: _are_alone(writer, 2))
        assert await writer.logs.delete(gone, 0, READ_S)
        peer = await cluster.add("b")
        await eventually(lambda: _is_at(peer, 2))
        assert await turns_at(peer, gone) is None

    play("a", scene)


async def _are_alone(node: LogNode, num: int) -> bool:
    return await _copies(node, "copy_alone") >= num


async def _copies(node: LogNode, *outcomes: str) -> int:
    copies = (await node.logs.stats())["copies"]
    return sum(copies.get(outcome, 0) for outcome in outcomes)


def test_copies_that_waited_when_an_actor_was_killed_are_made_by_the_next(play) -> None:
    async def scene(cluster: LogCluster) -> None:
        writer, (peer,) = cluster.nodes["a"], in_order(cluster, "a", KEY)
        await say(writer, KEY, 0, 1)
        await eventually(lambda: _is_at(peer, 1))
        peer.hangs = True
        await say(writer, KEY, 1, 3)
        await writer.logs.close()
        peer.hangs = False
        await writer.start()
        await eventually(lambda: _is_at(peer, 3))

    play("ab", scene)


def test_a_copy_that_nobody_could_take_is_made_later(play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(cluster: LogCluster) -> None:
        writer, (peer,) = cluster.nodes["a"], in_order(cluster, "a", KEY)

        async def num_failed() -> int:
            return int((await writer.logs.stats())["copies"].get("copy_failed", 0))

        peer.hangs = True
        await say(writer, KEY, 0, 2)
        await eventually(num_failed)
        peer.hangs = False
        await eventually(lambda: _is_at(peer, 2))

    monkeypatch.setattr(ray_session_logs, "_AGAIN_S", 0.05)
    play("ab", scene)


def test_a_folder_that_cannot_be_used_is_tried_again(play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then nobody knows what it holds."""

    async def scene(cluster: LogCluster) -> None:
        one, two = cluster.nodes["a"], cluster.nodes["b"]
        await say(two, KEY, 0, 1)
        await two.logs.close()
        opens, two.open_logs = two.open_logs, lambda: None
        await two.start()
        assert await two.logs.append(KEY, STEPS[2][0]) is Appended.FAILED
        assert not (await one.logs.read(key_number(2), 0, READ_S)).is_sure
        two.open_logs = opens
        await eventually(lambda: _is_at(two, 1))
        await say(two, KEY, 1, 2)

    monkeypatch.setattr(ray_session_logs, "_OPEN_AGAIN_S", 0.05)
    play("ab", scene)
