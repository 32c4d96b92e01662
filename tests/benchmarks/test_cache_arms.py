"""Arms of the cache tier's benchmarks are what they say, or fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from bench_cache_save import DecodingArm, PrefillingArm, write_row
from bench_cache_turn import ARMS, COLD, HOST, RECOMPUTE, WARM, Case, NextTurns, Pairs, Source, measure_pairs
from bench_tiers import OWN, PAPER, WARM_UP_SHARE, Workload, make_order, make_sessions, prompt_rows
from cache_engines import (
    CachedModel,
    Draw,
    RestartableStore,
    ThrottledFiles,
    bare_model,
    cache_config,
    make_engine,
    pages_for,
    tell,
)
from engines import request

from mneme.cachetier.config import CacheConfig
from mneme.cachetier.policy.cost_model import Calibration
from mneme.errors import MnemeError

ROW_S = 1.0  # loading is always worth it, however busy the machine is


@pytest.fixture(scope="module")
def model() -> CachedModel:
    torch.set_num_threads(1)
    terms = (0.0, ROW_S, 0.0)
    costs = Calibration(prefill=terms, decode=terms, step_rows=2048, kv_bytes_per_token=4096)
    return bare_model("llama-wide-kv", 2048, 0)._replace(calibration=costs)


@pytest.fixture
def turns(model: CachedModel, tmp_path: Path) -> Iterator[NextTurns]:
    with closing(NextTurns(model, 300, tmp_path, 0)) as found:
        yield found


def test_turns_come_from_where_their_arms_say(turns: NextTurns) -> None:
    found = turns.rounds(2)
    assert list(found) == list(ARMS)
    for name, took in found.items():
        assert len(took) == 2
        assert all(each.usage.cached_tokens >= 299 for each in took) == (name != RECOMPUTE)
        assert all(each.ttft_s > 0 for each in took)


@pytest.mark.parametrize("name", [HOST, COLD])
def test_an_arm_whose_kv_is_gone_fails(turns: NextTurns, name: str) -> None:
    for store in turns._stores.values():
        store.inner.node.delete([change.key for change in store.inner.node.snapshot()])
    with pytest.raises(MnemeError, match=f"arm {name}, 300 tokens of history: kv_details say"):
        turns.turn(name)


@pytest.mark.parametrize(("source", "restarts"), [(HOST, []), (WARM, [False] * 3), (COLD, [True] * 3)])
def test_pairs_count_what_the_controller_decided(
    model: CachedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Source, restarts: list[bool]
) -> None:
    seen: list[bool] = []
    restart = RestartableStore.restart

    def noted(store: RestartableStore, *, is_cold: bool) -> None:
        seen.append(is_cold)
        restart(store, is_cold=is_cold)

    monkeypatch.setattr(RestartableStore, "restart", noted)
    pairs = measure_pairs(model, Case("llama-wide-kv", 300, source), tmp_path, 2, 1e6, 0)
    assert pairs.outcomes == Counter(loaded=2)
    assert pairs.row()["pairs"] == 2
    assert seen == restarts


def test_a_figure_of_pairs_is_the_median_of_their_ratios() -> None:
    pairs = Pairs(Case("m", 1, WARM), [1.0, 3.0, 1.0], [2.0, 2.0, 1.0], Counter())
    assert (pairs.row()["ratio"], pairs.row()["worst"], pairs.row()["first"]) == (1.0, 1.5, 0.5)


def test_a_slow_disk_reads_as_fast_as_it_is_said_to(tmp_path: Path) -> None:
    slept: list[float] = []
    files = ThrottledFiles(slept.append)
    path = tmp_path / "file"
    path.write_bytes(bytes(5000))
    fd = files.open_to_read(str(path))
    assert files.read(fd, [bytearray(2000)], 0) == 2000
    files.bytes_per_s = 1000.0
    assert files.read(fd, [bytearray(4000)], 3000) == 2000
    files.close(fd)
    assert slept == [2.0]


def test_a_restart_leaves_files_only(model: CachedModel, tmp_path: Path) -> None:
    store = RestartableStore(cache_config(tmp_path))
    tell(model, store, Draw(0).ids(300))
    assert len(store.paths()) == 2
    assert store.inner.node.stats()["host"]["chunks"] == 2
    store.restart(is_cold=False)
    assert store.inner.node.stats()["host"]["chunks"] == 0
    assert len(store.paths()) == 2
    store.end()


@pytest.mark.parametrize("kind", [DecodingArm, PrefillingArm])
def test_a_stretch_saves_what_it_computes(
    model: CachedModel, tmp_path: Path, kind: type[DecodingArm] | type[PrefillingArm]
) -> None:
    for folder in (None, tmp_path):
        with closing(kind(model, folder, 3, 0)) as arm:
            took = [arm.stretch() for _ in range(2)][-1]
        assert took.num_tokens == kind.num_tokens
        assert (took.num_saved_bytes > 0) == (folder is not None)


def test_tails_that_wait_are_written_once(model: CachedModel, tmp_path: Path) -> None:
    delayed = write_row(model, tmp_path / "delayed", 3, 0, is_delayed=True)
    each = write_row(model, tmp_path / "each", 3, 0, is_delayed=False)
    assert delayed["distinct MB"] == each["distinct MB"] == 4 * 383 * 4096 / 1e6
    assert delayed["files"] == each["files"] == 8
    assert each["written over distinct"] == pytest.approx((127 + 255 + 256 + 127) / 383, rel=0.02)
    assert 1 <= delayed["written over distinct"] <= each["written over distinct"]


def test_conversations_have_the_papers_means() -> None:
    for setting, means in ((PAPER, (5.75, 31.1, 173.0)), (OWN, (7.58, None, None))):
        sessions = make_sessions(setting.lengths, 4000, 0)
        turns = [turn for each in sessions for turn in each.turns]
        assert len(turns) / len(sessions) == pytest.approx(means[0], rel=0.04)
        for of, mean in zip(zip(*turns, strict=True), means[1:], strict=True):
            assert mean is None or sum(of) / len(turns) == pytest.approx(mean, rel=0.04)


def test_a_workload_takes_every_turn_once_and_counts_after_its_first_fifth(model: CachedModel) -> None:
    sessions = make_sessions(OWN.lengths, 2, 0)
    order = make_order(sessions, 0)
    assert Counter(order) == {index: len(each.turns) for index, each in enumerate(sessions)}
    with closing(make_engine(model, None, CacheConfig(), pages_for(4 * 2048))) as engine:
        ran = Workload(engine, sessions, order, num_places=4).run()
        assert engine.num_tokens["generated"] == sum(t.num_out for each in sessions for t in each.turns)
    assert len(ran.turns) == len(order) - int(WARM_UP_SHARE * len(order))
    assert ran.tokens_from("device") > 0
    assert 0 < ran.prefill_s < ran.busy_s


def test_steps_are_known_by_the_prompt_rows_that_they_compute(model: CachedModel) -> None:
    """Those in which no prompt ends count, and those that only decode do not."""
    with closing(make_engine(model, None, CacheConfig(), pages_for(4096))) as engine:
        for name in "ab":
            engine.submit(request(name, Draw(ord(name)).ids(1500), 4))
        found = []
        workload = Workload(engine, [], [], num_places=4)
        with workload.noted_batches():
            while engine.has_work:
                engine.step()
                found.append(sum(map(prompt_rows, workload.scheduled)))
    assert found[:2] == [2048, 952]
    assert set(found[2:]) == {0}
