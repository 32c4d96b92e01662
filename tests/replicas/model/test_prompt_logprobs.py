"""Log-probabilities of prompts against `transformers`: beside other requests, in pieces, and computed by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mneme.cachetier.names import PUBLIC_SALT
from mneme.errors import InvalidRequest, TransferFailed
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model import runner as runner_module
from mneme.replicas.model.decoder import Decoder, StepInputs
from mneme.replicas.model.runner import Runner
from mneme.replicas.request import GenerationRequest, PromptLogprobs, SamplingParams
from mneme.replicas.truncation import Truncation
from tests.replicas.checkpoints import FLOAT32_TOLERANCE, decoder_of, write_checkpoint

TOP = 3
ONE = SamplingParams(max_tokens=1, temperature=0, seed=0, ignore_eos=True)
TOLD = SamplingParams(max_tokens=4, temperature=0, seed=0, ignore_eos=True, prompt_logprobs=TOP, logprobs=1)
PROMPTS = {"long": [5, 6, 7] * 15, "one": [9], "two": [9, 8], "same": [5, 6, 7] * 15, "other": list(range(40))}


class FailingRunner(Runner):
    """Loses one step after it was computed, where it is told to."""

    fails_at = 0
    num_steps = 0

    def forward(self, inputs: StepInputs | None) -> torch.Tensor:
        logits = super().forward(inputs)
        self.num_steps += 1
        if self.num_steps == self.fails_at:
            raise TransferFailed("on purpose")
        return logits


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("qwen2")
    return directory, write_checkpoint("qwen2", directory)


def engine_of(directory: Path, num_pages: int = 64, max_batch_tokens: int = 1024) -> Engine:
    runner = FailingRunner(decoder_of(directory, torch.float32), num_pages=num_pages, page_size=16)
    return Engine(runner, None, EngineConfig(page_size=16, max_running=8, max_batch_tokens=max_batch_tokens))


def submit(engine: Engine, name: str, ids: list[int], params: SamplingParams, **options: Any) -> None:
    request = GenerationRequest(request_id=name, prompt_token_ids=tuple(ids), sampling=params, **options)
    engine.submit(request)


def run(engine: Engine) -> dict[str, PromptLogprobs]:
    found: dict[str, PromptLogprobs] = {}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            if event.prompt_logprobs is not None:
                assert event.request_id not in found
                assert event.usage.cached_tokens == 0
                found[event.request_id] = event.prompt_logprobs
    return found


def check(model: Any, ids: list[int], told: PromptLogprobs) -> None:
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)[:-1].numpy()
    own = expected[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(told.logprobs, own, rtol=0, atol=FLOAT32_TOLERANCE)
    assert told.token_ids.tolist() == ids[1:]
    best = np.sort(expected, axis=-1)[:, ::-1][:, :TOP]
    np.testing.assert_allclose(told.top, best, rtol=0, atol=FLOAT32_TOLERANCE)
    at = np.take_along_axis(expected, told.top_ids.astype(np.int64), axis=-1)
    np.testing.assert_allclose(told.top, at, rtol=0, atol=FLOAT32_TOLERANCE)
    lowest, highest = ((expected > own[:, None] + sign * FLOAT32_TOLERANCE).sum(-1) + 1 for sign in (1, -1))
    assert ((lowest <= told.ranks) & (told.ranks <= highest)).all()


@pytest.mark.parametrize(
    ("max_batch_tokens", "max_logits", "fails_at"), [(1024, 1 << 24, 0), (24, 700, 0), (24, 1 << 24, 2)]
)
def test_every_token_of_a_prompt_is_told_whatever_is_cached(
    checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, max_batch_tokens: int, max_logits: int, fails_at: int
) -> None:
    directory, model = checkpoint
    monkeypatch.setattr(runner_module, "_MAX_LOGITS", max_logits)
    engine = engine_of(directory, max_batch_tokens=max_batch_tokens)
    submit(engine, "known", PROMPTS["long"], ONE)
    submit(engine, "public", PROMPTS["long"], ONE, salt=PUBLIC_SALT)
    assert run(engine) == {}
    runner = engine.runner
    assert isinstance(runner, FailingRunner)
    runner.fails_at = runner.num_steps + fails_at if fails_at else 0
    submit(engine, "beside", [5, 6, 7, 8], SamplingParams(max_tokens=12, temperature=0, seed=0, ignore_eos=True))
    for name, ids in PROMPTS.items():
        submit(engine, name, ids, TOLD)
    cached = engine.forest.resident("", PROMPTS["long"])
    found = run(engine)
    assert found.keys() == PROMPTS.keys()
    for name, ids in PROMPTS.items():
        check(model, ids, found[name])
    assert fails_at or sum(engine.forest.resident("", PROMPTS["long"])) == sum(cached)
    assert engine.forest.roots.keys() <= {"", PUBLIC_SALT}
    engine.forest.check()


def test_logits_of_a_prompt_are_made_in_slices(checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = checkpoint
    engine = engine_of(directory)
    sizes, logits = list[int](), Decoder.logits

    def counted(decoder: Decoder, hidden: torch.Tensor, *into: torch.Tensor | None) -> torch.Tensor:
        sizes.append(len(hidden))
        return logits(decoder, hidden, *into)

    monkeypatch.setattr(Decoder, "logits", counted)
    monkeypatch.setattr(runner_module, "_MAX_LOGITS", 7 * engine.runner.vocab_size)
    submit(engine, "long", PROMPTS["long"], TOLD)
    run(engine)
    assert (max(sizes), sum(sizes)) == (7, len(PROMPTS["long"]) - 1 + TOLD.max_tokens)


def test_who_was_suspended_is_told_all_of_its_prompt_once(checkpoint: tuple[Path, Any]) -> None:
    directory, model = checkpoint
    engine = engine_of(directory, num_pages=12, max_batch_tokens=24)
    grows = SamplingParams(max_tokens=70, temperature=0, seed=0, ignore_eos=True)
    submit(engine, "grows", [1, 2, 3], grows)
    submit(engine, "grows too", [3, 2, 1], grows)
    ids = [(7 * i) % 300 for i in range(100)]
    submit(engine, "told", ids, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, prompt_logprobs=TOP))
    found = run(engine)
    assert engine.scheduler.num_suspensions > 0
    check(model, ids, found["told"])


@pytest.mark.parametrize(
    "options", [{"session_id": "s"}, {"truncation": Truncation(strategy="recompute")}], ids=["session", "truncation"]
)
def test_what_may_not_compute_each_token_is_refused(checkpoint: tuple[Path, Any], options: dict[str, Any]) -> None:
    engine = engine_of(checkpoint[0])
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        submit(engine, "r", [1, 2, 3], TOLD, **options)
    assert not engine.has_work
