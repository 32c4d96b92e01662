"""Faults of a disk that is written, under engines on small real models: what is not saved is computed anew."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mneme.cachetier.node.sources import ProcessChunkStore
from mneme.errors import ConfigError
from mneme.replicas.model.decoder import Decoder
from tests.cachetier.chunks import FailingFiles, chunk_files, failing_at
from tests.replicas.cache_faults.saved_turn import NextTurn
from tests.replicas.connector.test_chunk_cache import wait_for_store
from tests.replicas.faulty_tier import (
    NUM_NEW,
    Outcome,
    SharedStore,
    ask,
    check_folder,
    check_rest,
    config_of,
    counters_of,
    faults_in,
    nothing_left_open,
    run_bounded,
)
from tests.replicas.tiered_engine import answers, draw, full_prefill, make_cached_engine, submit

WRITES = ("create", "write", "rename", "unlink")
FULL_BYTES = 512 << 10  # of a file system that is smaller than the tier's bound


class Dialogue:
    """A prompt of two full chunks and a tail, then its next turn by another engine."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.first = draw(21, 140)
        self.answers = {"first": full_prefill(decoder, self.first, NUM_NEW)[0]}
        self.turn = [*self.first, *self.answers["first"], 9, 9]
        self.answers["turn"] = full_prefill(decoder, self.turn, NUM_NEW)[0]

    def play(self, folder: Path, files: FailingFiles | None = None) -> list[Outcome]:
        """Both turns, each by a tier and an engine of its own; `ConfigError` if the folder cannot be used."""
        saving = ask(self.decoder, folder, {"first": self.first}, files=files)
        reading = ask(self.decoder, folder, {"turn": self.turn}, files=files, is_reader=True)
        assert saving.tokens | reading.tokens == self.answers
        return [saving, reading]


@pytest.fixture(scope="module")
def dialogue(decoder: Decoder) -> Dialogue:
    return Dialogue(decoder)


def fails_with(code: int, *operations: str) -> FailingFiles:
    return FailingFiles(lambda name, _number: code if name in operations else None)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_nothing_can_be_written(dialogue: Dialogue, tmp_path: Path, code: int) -> None:
    """Full, read-only, broken, or over a quota."""
    saving, reading = dialogue.play(tmp_path, fails_with(code, *WRITES))
    assert saving.counters["disk_write_failed"] > 0
    assert (saving.counters["disk_disk_full"] > 0) == (code in (errno.ENOSPC, errno.EDQUOT))
    assert reading.cached["turn"] == 0
    assert not chunk_files(tmp_path)
    assert all(each.cached["turn"] > 0 for each in dialogue.play(tmp_path)[1:])


def test_a_folder_that_is_read_only_keeps_what_it_has(next_turn: NextTurn) -> None:
    """An engine reads from it, and cannot save what it computes."""
    longer = [*next_turn.saved.turn, *draw(22, 100)]
    found = ask(
        next_turn.decoder, next_turn.folder, {"longer": longer}, files=fails_with(errno.EROFS, *WRITES, "touch")
    )
    assert found.tokens["longer"] == full_prefill(next_turn.decoder, longer, NUM_NEW)[0]
    assert found.cached["longer"] == next_turn.saved.num_history
    assert found.counters["disk_write_failed"] > 0
    assert next_turn.ask().cached["turn"] == next_turn.saved.num_history


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, where one may be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={FULL_BYTES},mode=700", "tmpfs", str(folder)]
    try:
        made = subprocess.run(mount, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if made.returncode:
        pytest.skip(f"no file system can be mounted: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=30)


def test_a_file_system_is_full(decoder: Decoder, small_disk: Path) -> None:
    """The tier's bound is more than it has: after each failure something makes room."""
    prompts = {str(number): draw(30 + number, 140) for number in range(10)}
    expected = {name: full_prefill(decoder, ids, NUM_NEW)[0] for name, ids in prompts.items()}
    found = ask(decoder, small_disk, prompts)
    assert found.tokens == expected
    assert found.counters["disk_disk_full"] > 0
    assert found.counters["disk_written"] > 0
    assert faults_in(small_disk) == 0
    again = ask(decoder, small_disk, prompts, is_reader=True)
    assert again.tokens == expected
    assert sum(again.cached.values()) > 0


def check_failing_calls(dialogue: Dialogue, folder: Path, every: int, code: int) -> None:
    """The k-th call to the file system fails, of all that two tiers and their engines make."""
    files = FailingFiles(lambda _name, _number: None)
    (folder / "0").mkdir(parents=True)
    dialogue.play(folder / "0", files)
    assert files.num_calls > 40
    num_refused = 0
    for number in range(1, files.num_calls + 1, every):
        case = folder / str(number)
        case.mkdir()
        try:
            dialogue.play(case, failing_at(number, code))
        except ConfigError:  # a tier that cannot use its folder says so at its start, and nowhere else
            num_refused += 1
        assert all(each.cached["turn"] > 0 for each in dialogue.play(case)[1:]), (number, code)
        assert faults_in(case) == 0
    assert num_refused <= 2 * 8  # the calls until both have the folder


def test_any_call_may_fail(dialogue: Dialogue, tmp_path: Path) -> None:
    check_failing_calls(dialogue, tmp_path, 12, errno.EIO)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_call_may_fail(dialogue: Dialogue, tmp_path: Path) -> None:
    for every, code in ((1, errno.EIO), (4, errno.ENOSPC)):
        check_failing_calls(dialogue, tmp_path / str(every), every, code)


class ForgetfulStore(SharedStore):
    """Engines over it put what another has put."""

    def known(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        return frozenset()


def test_two_engines_save_the_same_chunks(decoder: Decoder, dialogue: Dialogue, tmp_path: Path) -> None:
    """They compute them side by side; each is kept once."""
    config = config_of(tmp_path, host_bytes=64 << 20)
    with nothing_left_open():
        store = ProcessChunkStore(config)
        engines = [make_cached_engine(decoder, ForgetfulStore(store), config=config) for _ in range(2)]  # type: ignore[arg-type]
        for engine in engines:
            submit(engine, "first", dialogue.first, NUM_NEW)
        for engine in engines:
            wait_for_store(engine)
            engine.step()
        found = [answers(run_bounded(engine))["first"] for engine in engines]
        for engine in engines:
            engine.close()
            check_rest(engine, tmp_path, config)
        counters = counters_of(engines[0], store)
        store.close()
    del engines, store
    first = dialogue.answers["first"]
    assert all(first[len(first) - len(each) :] == each for each in found)
    assert counters["host_kept"] > 0
    keys = [path.name[:32] for path in chunk_files(tmp_path)]
    assert len(keys) == len(set(keys)) == 3
    assert faults_in(tmp_path) == 0
    check_folder(tmp_path)
    assert dialogue.play(tmp_path)[1].cached["turn"] == len(dialogue.turn) - 3
