"""An engine's process is killed while it saves; what it leaves is sound, within its bounds, and of use."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mneme.cachetier.node.sources import ProcessChunkStore
from mneme.errors import ConfigError
from mneme.replicas.model.decoder import Decoder
from tests.budget import examples
from tests.cachetier.chunks import chunk_files, folder_bytes
from tests.replicas.cache_faults.kill_engine import CAPACITY_BYTES, NUM_HISTORIES, config_in, load, prompt
from tests.replicas.checkpoints import write_checkpoint
from tests.replicas.faulty_tier import check_rest, counters_of, faults_in, nothing_left_open, run_bounded
from tests.replicas.tiered_engine import answers, full_prefill, make_cached_engine, submit, usages

ROOT = Path(__file__).resolve().parents[3]
NUM_NEW = 3


class Kills:
    """One folder over many lives of an engine."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.decoder: Decoder = load(model)
        self.expected: dict[int, list[int]] = {}

    def kill(self, seed: int) -> None:
        """Let an engine serve for a while."""
        module = "tests.replicas.cache_faults.kill_engine"
        command = [sys.executable, "-m", module, str(self.model), str(self.folder), str(seed)]
        # 256 folders here: the other process does not know of fewer
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path])}
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=environment) as process:
            assert process.stdout.readline() == b"ready\n"
            with pytest.raises(ConfigError, match="in use"):
                ProcessChunkStore(config_in(self.folder))
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.8 * random.Random(seed).random())
            process.kill()

    def check(self, seed: int) -> int:
        """What a restart finds is sound, and answers are right; the number of tokens that were not computed."""
        assert faults_in(self.folder) == len(list(self.folder.rglob("*.part")))
        with nothing_left_open():
            config = config_in(self.folder)
            store = ProcessChunkStore(config)
            assert not list(self.folder.rglob("*.part"))
            assert folder_bytes(self.folder) == store.node.stats()["disk"]["bytes"] <= CAPACITY_BYTES
            assert len(chunk_files(self.folder)) == store.node.stats()["disk"]["chunks"] > 0
            engine = make_cached_engine(self.decoder, store, config=config)
            num_cached = 0
            for number in random.Random(seed).sample(range(NUM_HISTORIES), 3):
                submit(engine, str(number), prompt(number), NUM_NEW)
                events = run_bounded(engine)
                assert answers(events)[str(number)] == self._answer(number)
                num_cached += usages(events)[str(number)].cached_tokens
            engine.close()
            check_rest(engine, self.folder, config)
            assert counters_of(engine, store)["misses"] == 0
        return num_cached

    def _answer(self, number: int) -> list[int]:
        if number not in self.expected:
            self.expected[number] = full_prefill(self.decoder, prompt(number), NUM_NEW)[0]
        return self.expected[number]


@pytest.fixture
def kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kills:
    monkeypatch.setattr("mneme.cachetier.node.folder.NUM_FOLDERS", 256)
    model, folder = tmp_path / "model", tmp_path / "tier"
    write_checkpoint("llama-3", model)
    folder.mkdir()
    return Kills(model, folder)


@pytest.mark.at_length
@pytest.mark.timeout(1800)
def test_an_engine_that_is_killed_leaves_only_sound_chunks(kills: Kills) -> None:
    num_cached = 0
    for seed in range(examples(1, at_length=5)):
        kills.kill(seed)
        num_cached += kills.check(seed)
    assert num_cached > 0
