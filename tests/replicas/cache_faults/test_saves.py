"""Faults of a disk that is written, under engines on small real models: what is not saved is computed anew."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from mneme.errors import ConfigError
from mneme.replicas.model.decoder import Decoder
from tests.budget import examples
from tests.cachetier.chunks import FailingFiles, chunk_files, failing_at
from tests.replicas.cache_faults.saved_turn import NextTurn
from tests.replicas.faulty_tier import NUM_NEW, Outcome, ask, faults_in
from tests.replicas.tiered_engine import draw, full_prefill

WRITES = ("create", "write", "rename", "unlink")


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


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_nothing_can_be_written(dialogue: Dialogue, tmp_path: Path, code: int) -> None:
    """Full, or broken."""
    saving, reading = dialogue.play(tmp_path, fails_with(code, *WRITES))
    assert saving.counters["disk_write_failed"] > 0
    assert (saving.counters["disk_disk_full"] > 0) == (code == errno.ENOSPC)
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


@pytest.mark.at_length
@pytest.mark.timeout(1800)
def test_any_call_may_fail(dialogue: Dialogue, tmp_path: Path) -> None:
    """The k-th call to the file system, of all that two tiers and their engines make."""
    files = FailingFiles(lambda _name, _number: None)
    (tmp_path / "0").mkdir()
    dialogue.play(tmp_path / "0", files)
    assert files.num_calls > 40
    num_refused, numbers = 0, range(1, files.num_calls + 1)
    for number in numbers[:: max(len(numbers) // examples(5, at_length=len(numbers)), 1)]:
        code, case = random.Random(number).choice([errno.EIO, errno.ENOSPC]), tmp_path / str(number)
        case.mkdir()
        try:
            dialogue.play(case, failing_at(number, code))
        except ConfigError:  # a tier that cannot use its folder says so at its start, and nowhere else
            num_refused += 1
        assert all(each.cached["turn"] > 0 for each in dialogue.play(case)[1:]), (number, code)
        assert faults_in(case) == 0
    assert num_refused <= 2 * 8  # the calls until both have the folder
