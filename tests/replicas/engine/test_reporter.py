"""What a replica reports is what its forest has: blocks that came, went to the host, or are gone."""

from __future__ import annotations

from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.reporter import IDLE_REPORT_S, REPORT_S, Reporter
from mneme.replicas.report import ReplicaReport, unpack
from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.router.token_hashes import block_hashes
from tests.budget import examples
from tests.replicas.fake_runner import FakeRunner

BLOCK = 64


def engine_and_reporter(num_pages: int, *, num_host_pages: int = 0, page_size: int = 16) -> tuple[Engine, Reporter]:
    runner = FakeRunner(num_pages, page_size, vocab_size=4096, num_host_pages=num_host_pages)
    engine = Engine(runner, None, EngineConfig())  # type: ignore[arg-type]
    ticks = count()
    return engine, Reporter(engine, "epoch", clock=lambda: next(ticks) * 2 * REPORT_S)


def run(engine: Engine, ids: list[int], *, salt: str = "", max_tokens: int = 1) -> list[int]:
    """Compute a prompt and an answer; returns both."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=0)
    engine.submit(GenerationRequest(request_id="r", prompt_token_ids=tuple(ids), sampling=params, salt=salt))
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
    engine, reporter = engine_and_reporter(64)
    told = Told()
    ids = run(engine, list(range(150)), salt="tenant", max_tokens=50)
    told.take(reporter.poll())
    assert told.tier == dict.fromkeys(block_hashes(ids[:-1], salt="tenant"), "device")
    assert len(told.tier) == 3
    other = run(engine, [*range(100), *range(200, 230)], salt="tenant")  # leaves the first in the middle of a page
    told.take(reporter.poll())
    assert told.tier.keys() == {*block_hashes(ids[:-1], salt="tenant"), *block_hashes(other[:-1], salt="tenant")}


def test_what_was_there_before_and_what_was_missed_is_in_a_snapshot() -> None:
    engine, _ = engine_and_reporter(64)
    ids = run(engine, list(range(128)))
    reporter = Reporter(engine, "next")
    first = reporter.poll()
    assert first is not None
    assert sorted(unpack(first.device)) == sorted(block_hashes(ids[:128]))
    whole = reporter.snapshot()
    assert (whole.is_snapshot, whole.epoch, whole.seq) == (True, "next", first.seq)
    assert sorted(unpack(whole.device)) == sorted(unpack(first.device))


def test_nothing_is_said_that_is_not_new_and_nothing_too_often() -> None:
    engine, _ = engine_and_reporter(64)
    now_s = [0.0]
    reporter = Reporter(engine, "epoch", clock=lambda: now_s[0])
    run(engine, list(range(128)))
    assert reporter.is_waiting
    assert reporter.poll() is not None
    assert not reporter.is_waiting
    run(engine, list(range(1000, 1128)))
    assert reporter.poll() is None
    assert reporter.is_waiting
    now_s[0] += REPORT_S
    assert reporter.poll() is not None
    now_s[0] += REPORT_S
    assert reporter.poll() is None


def test_a_replica_is_heard_of_every_second_while_it_has_work_and_else_every_other() -> None:
    engine, _ = engine_and_reporter(64)
    now_s = [0.0]
    reporter = Reporter(engine, "epoch", clock=lambda: now_s[0])
    params = SamplingParams(temperature=0, max_tokens=30, seed=0)
    engine.submit(GenerationRequest(request_id="r", prompt_token_ids=(1, 2, 3), sampling=params))
    said_s = []
    while engine.has_work:
        engine.step()
        if reporter.poll() is not None:
            said_s.append(now_s[0])
        now_s[0] += 0.5
    assert all(after - before <= 1.0 for before, after in pairwise(said_s))
    now_s[0] += IDLE_REPORT_S
    idle = reporter.poll()
    assert idle is not None
    assert (idle.running, idle.waiting) == (0, 0)
    now_s[0] += IDLE_REPORT_S / 2
    assert reporter.poll() is None
    now_s[0] += IDLE_REPORT_S / 2
    assert reporter.poll() is not None


def test_a_snapshot_for_one_ingress_is_no_news_for_the_others() -> None:
    engine, reporter = engine_and_reporter(64)
    params = SamplingParams(temperature=0, max_tokens=30, seed=0)
    engine.submit(GenerationRequest(request_id="r", prompt_token_ids=(1, 2, 3), sampling=params))
    engine.step()
    busy = reporter.poll()
    engine.abort("r")
    snapshot, news = reporter.snapshot(), reporter.poll()
    assert busy is not None
    assert news is not None
    assert (busy.running, snapshot.running, news.running) == (1, 0, 0)
    assert reporter.poll() is None


def test_the_load_counts_what_waits_and_runs() -> None:
    engine, reporter = engine_and_reporter(64)
    params = SamplingParams(temperature=0, max_tokens=8, seed=0)
    for index in range(3):
        prompt = tuple(range(index * 1000, index * 1000 + 100))
        engine.submit(GenerationRequest(request_id=str(index), prompt_token_ids=prompt, sampling=params))
    report = reporter.poll()
    assert report is not None
    assert (report.running, report.waiting, report.queued_tokens) == (0, 3, 300)
    engine.step()
    report = reporter.poll()
    assert report is not None
    assert (report.running, report.waiting) == (3, 0)
    assert report.free_page_share < 1


@pytest.mark.at_length
@settings(max_examples=examples(8, at_length=25))
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 14), st.integers(0, 40)), min_size=1, max_size=12),
    st.sampled_from([0, 12, 40]),
)
def test_reports_follow_the_forest_through_evictions(turns: list[tuple[int, int, int]], num_host_pages: int) -> None:
    engine, reporter = engine_and_reporter(24, num_host_pages=num_host_pages)
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
