"""What a replica reports is what its forest has: blocks that came, went to the host, or are gone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.reporter import IDLE_REPORT_S, REPORT_S, Reporter
from mneme.replicas.report import ReplicaReport, unpack
from mneme.replicas.request import SamplingParams
from mneme.router.token_hashes import block_hashes
from tests.budget import examples
from tests.replicas.fake_runner import FakeRunner
from tests.replicas.schedule.test_engine_policy import make_request

BLOCK = 64


class Ticks:
    """Each time that it is asked it is later by this."""

    def __init__(self, tick_s: float = 2 * REPORT_S) -> None:
        self.now_s, self.tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def engine_and_reporter(num_pages: int = 64, **more: Any) -> tuple[Engine, Reporter, Ticks]:
    runner: Any = FakeRunner(num_pages, 16, vocab_size=4096, **more)
    engine, clock = Engine(runner, None, EngineConfig()), Ticks()
    return engine, Reporter(engine, "epoch", clock=clock), clock


def submit(engine: Engine, ids: Sequence[int], *, name: str = "r", salt: str = "", max_tokens: int = 1) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=0)
    engine.submit(make_request(name, list(ids), params, salt=salt))


def run(engine: Engine, ids: Sequence[int], **more: Any) -> list[int]:
    """Compute a prompt and an answer; returns both."""
    submit(engine, ids, **more)
    said = list(ids)
    while engine.has_work:
        for event in engine.step():
            said += event.token_ids
    return said


class Told:
    """Follows reports, as an ingress does."""

    def __init__(self) -> None:
        self.tier: dict[int, str] = {}
        self.seq = -1

    def take(self, report: ReplicaReport | None) -> None:
        if report is None:
            return
        assert report.seq == self.seq + 1
        self.seq = report.seq
        for block in unpack(report.gone):
            del self.tier[block]
        for name in ("device", "host"):
            self.tier.update(dict.fromkeys(unpack(getattr(report, name)), name))


def resident_blocks(engine: Engine, prompts: list[tuple[str, list[int]]]) -> dict[int, str]:
    """What the forest itself says of each prompt's leading blocks."""
    found: dict[int, str] = {}
    for salt, ids in prompts:
        for index, block in enumerate(block_hashes(ids, salt=salt)):
            device, host = engine.forest.resident(salt, ids[: (index + 1) * BLOCK])
            if device == (index + 1) * BLOCK:
                found[block] = "device"
            elif device + host == (index + 1) * BLOCK:
                found[block] = found.get(block, "host")
    return found


def test_blocks_have_the_routers_names() -> None:
    engine, reporter, _ = engine_and_reporter()
    told = Told()
    ids = run(engine, range(150), salt="tenant", max_tokens=50)
    told.take(reporter.poll())
    assert told.tier == dict.fromkeys(block_hashes(ids[:-1], salt="tenant"), "device")
    assert len(told.tier) == 3
    other = run(engine, [*range(100), *range(200, 230)], salt="tenant")  # leaves the first in the middle of a page
    told.take(reporter.poll())
    assert told.tier.keys() == {*block_hashes(ids[:-1], salt="tenant"), *block_hashes(other[:-1], salt="tenant")}


def test_what_was_there_before_and_what_was_missed_is_in_a_snapshot() -> None:
    engine, _, _ = engine_and_reporter()
    ids = run(engine, range(128))
    reporter = Reporter(engine, "next")
    first, whole = reporter.poll(), reporter.snapshot()
    assert sorted(unpack(first.device)) == sorted(unpack(whole.device)) == sorted(block_hashes(ids[:128]))
    assert (whole.is_snapshot, whole.epoch, whole.seq) == (True, "next", first.seq)


def test_a_replica_is_heard_of_when_there_is_news_every_second_while_it_has_work_and_else_every_other() -> None:
    engine, reporter, clock = engine_and_reporter()
    clock.tick_s = 0.0
    run(engine, range(128))
    assert reporter.is_waiting
    assert reporter.poll() is not None
    assert not reporter.is_waiting
    run(engine, range(1000, 1128))
    assert reporter.poll() is None  # so soon
    assert reporter.is_waiting
    clock.now_s += REPORT_S
    assert reporter.poll() is not None
    clock.now_s = 10.0
    submit(engine, [1, 2, 3], max_tokens=30)
    said_s = []
    while engine.has_work:
        engine.step()
        said_s += [clock.now_s] if reporter.poll() is not None else []
        clock.now_s += 0.5
    assert all(after - before <= 1.0 for before, after in pairwise(said_s))
    clock.now_s += IDLE_REPORT_S
    idle = reporter.poll()
    assert (idle.running, idle.waiting) == (0, 0)
    clock.now_s += IDLE_REPORT_S / 2
    assert reporter.poll() is None
    clock.now_s += IDLE_REPORT_S / 2
    assert reporter.poll() is not None


def test_a_snapshot_for_one_ingress_is_no_news_for_the_others() -> None:
    engine, reporter, _ = engine_and_reporter()
    submit(engine, [1, 2, 3], max_tokens=30)
    engine.step()
    busy = reporter.poll()
    engine.abort("r")
    snapshot, news = reporter.snapshot(), reporter.poll()
    assert (busy.running, snapshot.running, news.running) == (1, 0, 0)
    assert reporter.poll() is None


def test_the_load_counts_what_waits_and_runs() -> None:
    engine, reporter, _ = engine_and_reporter()
    for index in range(3):
        submit(engine, range(index * 1000, index * 1000 + 100), name=str(index), max_tokens=8)
    report = reporter.poll()
    assert (report.running, report.waiting, report.queued_tokens) == (0, 3, 300)
    engine.step()
    report = reporter.poll()
    assert (report.running, report.waiting) == (3, 0)
    assert report.free_page_share < 1


@pytest.mark.at_length
@settings(max_examples=examples(8, at_length=25))
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 14), st.integers(0, 40)), min_size=1, max_size=12),
    st.sampled_from([0, 12, 40]),
)
def test_reports_follow_the_forest_through_evictions(turns: list[tuple[int, int, int]], num_host_pages: int) -> None:
    engine, reporter, _ = engine_and_reporter(24, num_host_pages=num_host_pages)
    told = Told()
    prompts: list[tuple[str, list[int]]] = []
    for which, num_pages, tail in turns:
        salt = "ab"[which % 2]
        ids = [*[which] * (num_pages * 16), *range(100 + tail, 100 + 2 * tail)]
        prompts.append((salt, run(engine, ids, salt=salt, max_tokens=3)))
        told.take(reporter.poll())
        engine.forest.check()
        assert told.tier == resident_blocks(engine, prompts)
    engine.forest.drop_salts(lambda salt: salt == "a")
    told.take(reporter.poll())
    assert told.tier == resident_blocks(engine, prompts)
