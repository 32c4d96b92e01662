"""The plans that a runner keeps, edits and builds by the tree are those that its sequences' tables give."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mneme.kernels.attention import build_plan
from mneme.kernels.segments import Lineages
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.forest.tree import NOWHERE
from mneme.replicas.model.decoder import Decoder, StepInputs
from mneme.replicas.model.runner import Runner
from mneme.replicas.request import SamplingParams
from mneme.replicas.sequence import StepRows
from tests.budget import rarer
from tests.kernels.test_lineages import pieces_of, segments_of
from tests.replicas.checkpoints import decoder_of, write_checkpoint
from tests.replicas.schedule.test_engine_policy import make_request

pytestmark = pytest.mark.engine

PAGE_SIZE = 4


class CheckedRunner(Runner):
    """Computes nothing: it draws one of two tokens, and looks at the plan of each step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_by_tree = self.num_kept = 0
        self.num_shared = 0
        self._last: Any = None

    def prepare(self, batch: list[StepRows], *others: Any) -> StepInputs | None:
        inputs = super().prepare(batch, *others)
        if inputs is not None:
            self.check(batch, inputs)
        return inputs

    def check(self, batch: list[StepRows], inputs: StepInputs) -> None:
        plan = inputs.plan
        tables = plan.page_tables
        expected = []
        for part in batch:
            path = part.sequence.path
            here = [index for index, page_id in enumerate(path.page_ids) if page_id != NOWHERE]
            masks = path.all_masks().tolist()
            expected.append([(path.page_ids[index], masks[index]) for index in here])
        listed = [list(zip(each.page_ids.tolist(), each.masks.tolist(), strict=True)) for each in tables]
        assert sorted(listed) == sorted(expected)
        sizes = {"num_q_heads": plan.num_q_heads, "num_kv_heads": plan.num_kv_heads, "head_dim": plan.head_dim}
        fresh = build_plan(tables, plan.rows, page_size=PAGE_SIZE, **sizes, share=plan.share, cost=plan.cost)
        assert segments_of(plan) == segments_of(fresh)
        assert pieces_of(plan) == pieces_of(fresh)
        rows = list(zip(inputs.positions.tolist(), inputs.slots.tolist(), strict=True))
        wanted = [list(zip(part.positions.tolist(), slots_of(part), strict=True)) for part in batch]
        assert sorted(rows) == sorted(row for each in wanted for row in each)
        sampled = [each[-1] for part, each in zip(batch, wanted, strict=True) if part.samples]
        assert [rows[row] for row in inputs.sampled_rows.tolist()] == sampled
        self.num_by_tree += isinstance(plan.laid_out, Lineages)
        self.num_kept += plan.segments is self._last
        self.num_shared += plan.work.num_shared
        self._last = plan.segments

    def launch(self, inputs: StepInputs) -> torch.Tensor:
        logits = torch.full((len(inputs.sampled_rows), self.vocab_size), -1e9)
        logits[:, 1:3] = 0.0
        return logits


def slots_of(part: StepRows) -> list[int]:
    """Return where each row's KV goes: to the spare slot, 0, if it is there already."""
    slots = [page_id * PAGE_SIZE + offset + i for page_id, offset, count in part.runs for i in range(count)]
    return slots + [0] * (part.num_rows - len(slots))


@pytest.fixture(scope="module", params=["llama-3", "mistral"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory: Path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    return decoder_of(directory)


@pytest.mark.parametrize("seed", [0, *rarer([1])])
@pytest.mark.parametrize(("share", "runs_ahead"), [("auto", False), ("always", False), ("always", True)])
def test_each_steps_plan_is_that_of_its_tables(
    decoder: Decoder, seed: int, share: Any, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among prompts that begin alike, twins, chunks of prompts, suspensions and pages that come back from the host."""
    rng = random.Random(seed)
    decoder.share = share
    monkeypatch.setattr(Runner, "runs_ahead", runs_ahead)
    runner = CheckedRunner(decoder, rng.choice([60, 400]), PAGE_SIZE, num_host_pages=40)
    engine = Engine(runner, None, EngineConfig(max_batch_tokens=24, max_running=10))
    prefixes = [[rng.randrange(1, 3) for _ in range(rng.randrange(40))] for _ in range(3)]
    for number in range(150):
        if rng.random() < 0.2:
            ids = rng.choice(prefixes) + [rng.randrange(1, 3) for _ in range(rng.randrange(1, 30))]
            seed_of_twins = rng.randrange(2)
            params = SamplingParams(temperature=1.0, seed=seed_of_twins, max_tokens=rng.randrange(1, 50))
            for choice in range(rng.choice([1, 1, 2])):
                engine.submit(make_request(f"r{number}.{choice}", ids, params))
        if rng.random() < 0.05 and engine.in_flight:
            engine.abort(rng.choice(list(engine.in_flight)))
        engine.step()
        engine.forest.check()
    assert runner.num_kept > 10
    assert (engine.num_ahead > 50) is runs_ahead
    assert share == "auto" or runner.num_shared > 0
    assert runner.num_by_tree > (0 if runner.immovable else 50)
    runner.close()
