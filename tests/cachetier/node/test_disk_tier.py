"""The disk tier: chunks under a bound, found again after a restart."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mneme.cachetier.chunk.file import file_bytes
from mneme.cachetier.chunk.header import Chunk
from mneme.cachetier.chunk.keys import prefix_lineage
from mneme.cachetier.chunk.syscalls import FileOperations, LockWaitingFiles
from mneme.cachetier.config import DiskTierConfig
from mneme.cachetier.names import EvictionPolicyName
from mneme.cachetier.node.disk import DiskTier, Put
from mneme.cachetier.node.index import descendants
from mneme.cachetier.policy.eviction import LruPolicy, make_policy
from mneme.errors import ConfigError
from tests.budget import examples
from tests.cachetier.chunks import (
    CHUNK_TOKENS,
    FINGERPRINT,
    LINEAGE,
    chain_of,
    chunk_files,
    chunk_of,
    folder_bytes,
    is_payload,
    read_all,
)
from tests.cachetier.nodes import BLOCK, Clock, opened

pytestmark = pytest.mark.usefixtures("few_folders")

FULL = list(range(10, 10 + CHUNK_TOKENS))


def make_tier(
    folder: Path,
    num_blocks: int = 100,
    *,
    clock: Callable[[], float] | None = None,
    wall_clock: Callable[[], float] | None = None,
    files: FileOperations | None = None,
    **options: Any,
) -> DiskTier:
    clock = clock or Clock()
    config = DiskTierConfig(folder=str(folder), capacity_bytes=num_blocks * BLOCK)
    if wall_clock is not None:
        options["wall_clock"] = wall_clock
    return opened(DiskTier(config, LruPolicy(), files=files, clock=clock, **options))


def is_there(tier: DiskTier, chunk: Chunk) -> bool:
    return is_payload(read_all(tier.open(chunk.header.key)), chunk)


def test_a_folder_has_one_tier(tmp_path: Path) -> None:
    first = make_tier(tmp_path)
    with pytest.raises(ConfigError, match="in use by another cluster"):
        make_tier(tmp_path)
    first.close()
    make_tier(tmp_path)
    first.close()  # its descriptor is the second one's now
    with pytest.raises(ConfigError, match="in use by another cluster"):
        make_tier(tmp_path)


def test_a_tier_waits_for_a_lock_that_is_about_to_be_let_go(tmp_path: Path) -> None:
    """That of a process that was ended, and is not gone yet."""
    first = make_tier(tmp_path)
    tries = []

    class Files(LockWaitingFiles):
        def lock(self, path: str) -> int:
            tries.append(path)
            threading.Timer(0.1, first.close).start()
            return super().lock(path)

    make_tier(tmp_path, files=Files()).close()
    assert len(tries) == 1


def test_a_tail_is_superseded_by_what_begins_with_it(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    tails = [chunk_of(FULL[:length]) for length in (2, 3, 5, CHUNK_TOKENS)]
    fork = chunk_of([*FULL[:2], 99])
    tier.put(fork)
    for index, tail in enumerate(tails):
        assert tier.put(tail) is Put.WRITTEN
        assert len(chunk_files(tmp_path)) == 2
        assert [is_there(tier, other) for other in tails] == [other is tails[index] for other in tails]
    assert is_there(tier, fork)
    counters = tier.stats()
    assert counters["superseded"] == 3
    assert counters["superseded_bytes"] == sum(file_bytes(tail.header) for tail in tails[:3])


def test_a_chunk_that_others_descend_from_is_not_superseded(tmp_path: Path) -> None:
    """Whoever calls a short chunk a parent keeps it."""
    tier = make_tier(tmp_path)
    short, full = chunk_of(FULL[:3]), chunk_of(FULL)
    child = chunk_of([1], short.header.key)
    for chunk in (short, child, full):
        tier.put(chunk)
    assert is_there(tier, short)


def test_the_least_recently_used_leaf_goes_first(tmp_path: Path) -> None:
    clock = Clock()
    tier = make_tier(tmp_path, 6, clock=clock)
    old, new = chain_of([1, *range(20)]), chain_of([2, *range(20)])
    for chunk in (*old, *new):
        clock.now_s += 1
        tier.put(chunk)
    clock.now_s += 1
    assert is_there(tier, old[2])
    others = [chunk_of([number]) for number in range(200, 205)]
    gone = []
    for other in others:
        clock.now_s += 1
        tier.put(other)
        gone.append([chunk for chunk in (*old, *new) if chunk.header.key not in tier])
    assert gone == [new[2:], new[1:], new, [old[2], *new], [*old[1:], *new]]
    assert tier.stats()["evicted"] == 5


@pytest.mark.parametrize("policy", ["lru", "pensieve", "lookahead", "returning"])
def test_the_bounds_hold_under_every_policy(tmp_path: Path, policy: EvictionPolicyName) -> None:
    clock, chance = Clock(), random.Random(3)
    config = DiskTierConfig(folder=str(tmp_path), capacity_bytes=9 * BLOCK + 100)
    tier = opened(DiskTier(config, make_policy(policy, clock, 9), clock=clock, max_files=7))
    chunks = [chunk for root in range(9) for chunk in chain_of([root, *range(20)])]
    for _ in range(150):
        clock.now_s += chance.random()
        chunk = chance.choice(chunks)
        if chance.random() < 0.5:
            tier.put(chunk)
        else:
            assert is_there(tier, chunk) == (chunk.header.key in tier)
        assert folder_bytes(tmp_path) == tier.stats()["bytes"] <= config.capacity_bytes
        assert len(chunk_files(tmp_path)) == tier.stats()["chunks"] <= 7
    assert tier.stats()["evicted"] > 10


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "open", "delete", "restart", "below", "expire"]), st.integers(0, 11)), max_size=30
)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_any_order_of_calls_is_a_dictionary_of_chunks(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    folder, clock = tmp_path_factory.mktemp("tier"), Clock()
    chunks = [chunk for root in range(4) for chunk in chain_of([root, *range(19)])]
    tier, model = make_tier(folder, clock=clock, ttl_s=10), dict[bytes, float]()
    for operation, number in steps:
        clock.now_s += 1
        chunk, key = chunks[number], chunks[number].header.key
        if operation == "put":
            assert (tier.put(chunk) is Put.WRITTEN) == (key not in model)
            model[key] = clock.now_s
        elif operation == "open":
            assert is_there(tier, chunk) == (key in model)
            model.update({key: clock.now_s} if key in model else {})
        elif operation == "delete":
            assert tier.delete([key, key[::-1]]) == (model.pop(key, None) is not None)
        elif operation == "below":
            rest = [c.header.key for c in chunks[number + 1 : number // 3 * 3 + 3]]
            below = list(takewhile(model.__contains__, rest))  # what lies behind a gap is not found by descent
            assert tier.delete(descendants(key, tier.children)) == len(below)
            for other in below:
                del model[other]
        elif operation == "expire":
            late = [other for other, used_s in model.items() if used_s < clock.now_s - 10]
            assert tier.expire() == len(late)
            for other in late:
                del model[other]
        else:
            tier.close()
            tier = make_tier(folder, clock=clock, ttl_s=10)
            for other in model:
                tier.open(other).close()  # type: ignore[union-attr]
            model = dict.fromkeys(model, clock.now_s)
        assert {c.header.key for c in chunks if c.header.key in tier} == set(model)
        assert tier.stats()["bytes"] == folder_bytes(folder) == BLOCK * len(model)
    tier.close()


def test_chunks_expire_by_their_last_use_and_not_by_wall_clocks(tmp_path: Path) -> None:
    clock, wall = Clock(), Clock(2e9)
    tier = make_tier(tmp_path, clock=clock, wall_clock=wall, ttl_s=100)
    one, two = chunk_of([1]), chunk_of([2])
    tier.put(one)
    tier.put(two)
    for jump_s in (1e6, -2e6):
        wall.now_s += jump_s
        assert tier.expire() == 0
    clock.now_s += 60
    assert is_there(tier, two)
    clock.now_s += 60
    assert tier.expire() == 1
    assert [one.header.key in tier, two.header.key in tier] == [False, True]
    assert not is_there(tier, one)


@pytest.mark.parametrize("wall_s", [0.0, 1.5e9, 4e9])
def test_a_wall_clock_that_jumped_makes_no_chunk_old(tmp_path: Path, wall_s: float) -> None:
    """Over a restart only the files' own times count, from the newest on."""
    tier, chunks = make_tier(tmp_path), [chunk_of([number]) for number in range(3)]
    for chunk, time_s in zip(chunks, (1.5e9 - 500, 1.5e9 - 50, 1.5e9), strict=True):
        tier.put(chunk)
        (path,) = [path for path in chunk_files(tmp_path) if path.name.startswith(chunk.header.key.hex())]
        os.utime(path, (time_s, time_s))
    tier.close()
    tier = make_tier(tmp_path, wall_clock=lambda: wall_s, ttl_s=100)
    assert tier.expire() == (0 if wall_s == 0 else 1)
    assert all(chunk.header.key in tier for chunk in chunks[1:])


def test_a_use_counts_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    tier, chunks = make_tier(tmp_path, clock=clock), [chunk_of([number]) for number in range(3)]
    for chunk in chunks:
        tier.put(chunk)
    for path in chunk_files(tmp_path):
        os.utime(path, (1e9, 1e9))
    clock.now_s += 100
    assert is_there(tier, chunks[1])
    tier.close()
    tier = make_tier(tmp_path, 1)
    assert [chunk.header.key in tier for chunk in chunks] == [False, True, False]


def test_a_start_removes_what_a_crash_left_and_touches_nothing_else(tmp_path: Path) -> None:
    tier, chunks = make_tier(tmp_path), [chunk_of([number]) for number in range(6)]
    for chunk in chunks:
        tier.put(chunk)
    tier.close()
    by_key = {path.name[:32]: path for path in chunk_files(tmp_path)}
    short, linked, foreign, misplaced, _, good = (by_key[chunk.header.key.hex()] for chunk in chunks)
    os.truncate(short, 100)
    target = tmp_path / "target"
    linked.rename(target)
    linked.symlink_to(target)
    temporary = good.with_name("0" * 32 + ".7.part")
    temporary.write_bytes(b"x" * 9000)
    foreign.rename(foreign.with_suffix(".kv2"))
    other_folder = misplaced.parent.parent / f"{int(misplaced.parent.name, 16) ^ 1:02x}"
    misplaced.rename(other_folder / misplaced.name)
    strangers = [good.with_name("readme.txt"), good.with_name("x.part"), tmp_path / "mine", good.parent.parent / "zz"]
    for stranger in strangers:
        stranger.write_text("not yours")
    tier = make_tier(tmp_path)
    assert [is_there(tier, chunk) for chunk in chunks] == [False] * 4 + [True] * 2
    assert not short.exists()
    assert not temporary.exists()
    assert not (other_folder / misplaced.name).exists()
    assert linked.is_symlink()
    assert target.exists()
    assert foreign.with_suffix(".kv2").exists()
    assert all(stranger.read_text() == "not yours" for stranger in strangers)
    counters = tier.stats()
    assert (counters["scan_removed"], counters["scan_unknown"], counters["scan_not_ours"]) == (3, 3, 1)
    assert tier.put(chunks[0]) is Put.WRITTEN


def test_a_smaller_quota_is_kept_to_from_the_start(tmp_path: Path) -> None:
    tier, chain, theirs = make_tier(tmp_path), chain_of(list(range(8 * 10))), prefix_lineage(FINGERPRINT, "b")
    for chunk in [*chain, chunk_of([1], lineage=theirs)]:
        assert tier.put(chunk) is Put.WRITTEN
    tier.close()
    tier = make_tier(tmp_path, tenant_bytes=3 * BLOCK)
    assert tier.blocks_by_tenant == {LINEAGE.tenant: 3, theirs.tenant: 1}
    assert [chunk.header.key in tier for chunk in chain] == [True] * 3 + [False] * 7
    assert folder_bytes(tmp_path) == 4 * BLOCK


@pytest.mark.parametrize("bound", [{"num_blocks": 4}, {"tenant_bytes": 4 * BLOCK}], ids=str)
def test_a_chain_does_not_evict_its_own_beginning(tmp_path: Path, bound: dict[str, int]) -> None:
    tier, chain = make_tier(tmp_path, **bound), chain_of(list(range(8 * 5)))
    assert tier.put(chunk_of([77])) is Put.WRITTEN
    assert [tier.put(chunk) for chunk in chain] == [Put.WRITTEN] * 4 + [Put.NO_ROOM]
    assert [is_there(tier, chunk) for chunk in chain] == [True] * 4 + [False]
    assert tier.put(chunk_of([78])) is Put.WRITTEN  # what is held for a write is let go behind it


def test_what_never_fits_is_not_written(tmp_path: Path) -> None:
    for config in ({"num_blocks": 0}, {"num_blocks": 9, "max_files": 0}):
        tier = make_tier(tmp_path, **config)  # type: ignore[arg-type]
        assert tier.put(chunk_of([1])) is Put.NO_ROOM
        assert folder_bytes(tmp_path) == 0
        tier.close()


def test_names_that_make_a_circle_can_still_be_evicted(tmp_path: Path) -> None:
    make_tier(tmp_path).close()
    for key, parent in (("00" * 16, "01" * 16), ("01" * 16, "00" * 16), ("02" * 16, "02" * 16)):
        name = f"{key}-{parent}-{'0' * 16}-{'0' * 16}-p1-5.kv"
        (tmp_path / "mneme-kv-1" / key[:2] / name).write_bytes(b"12345")
    tier = make_tier(tmp_path, 3)
    assert tier.stats()["chunks"] == 3
    for number in range(3):
        assert tier.put(chunk_of([number])) is Put.WRITTEN
    assert folder_bytes(tmp_path) == 3 * BLOCK


@pytest.mark.parametrize("kind", ["missing", "file", "link", "open"])
def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, kind: str) -> None:
    if kind == "missing":
        folder = tmp_path / "no" / "such"
    else:
        folder, own = tmp_path, tmp_path / "mneme-kv-1"
        if kind == "file":
            own.write_text("")
        elif kind == "link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            own.symlink_to(tmp_path / "elsewhere")
        else:
            own.mkdir()
            own.chmod(0o777)
    with pytest.raises(ConfigError, match="disk tier"):
        make_tier(folder)


@pytest.mark.parametrize("config", [{"capacity_bytes": -1}, {"folder": " "}])
def test_absurd_configurations_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(config))):
        DiskTierConfig(**({"folder": "x", "capacity_bytes": 0} | config))
