"""Our decoder against `transformers`, token by token, for every supported kind of model.

Each scenario generates 64 tokens greedily and keeps the logits it sampled from; `transformers` then computes the
logits of the same tokens in one pass. float32: |difference| <= 2e-4 and the tokens of `generate`.
bfloat16: |difference| <= BF16_TOLERANCE, and each token is the reference's unless two of its logits are that close;
and against the float32 model our error is no larger than that of `transformers` in bfloat16.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.directory import load_model_config
from mneme.replicas.request import GenerationRequest, SamplingParams
from tests.budget import rarer
from tests.replicas.checkpoints import CHECKPOINTS, RecordingRunner, decoder_of, make_model, write_checkpoint

FLOAT32_TOLERANCE = 2e-4
# The logits have a standard deviation of 1.2. Both sides round to 8 bits at every operation: against float32 each is
# off by 0.02 to 0.05 in the mean square, and by up to 0.5 where errors add up.
BF16_TOLERANCE = 0.75
BF16_RMS_TOLERANCE = 0.06
BF16_GAP_TOLERANCE = 0.25  # five times that, twice: where the reference's best two logits are closer, either may win
NUM_TOKENS = 64


@pytest.fixture(scope="module", params=list(CHECKPOINTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    return directory, write_checkpoint(request.param, directory)


def make_engine(directory: Path, dtype: torch.dtype, **options: Any) -> Engine:
    runner = RecordingRunner(decoder_of(directory, dtype), num_pages=64, page_size=16)
    return Engine(runner, None, EngineConfig(page_size=16, **options))


def prompts(lengths: list[int], shared: int = 0) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(11)
    head = torch.randint(0, 320, (shared,), generator=generator).tolist()
    return {
        f"r{i}": head + torch.randint(0, 320, (length,), generator=generator).tolist()
        for i, length in enumerate(lengths)
    }


def generate(engine: Engine, ids_by_request: dict[str, list[int]]) -> dict[str, list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    output: dict[str, list[int]] = {name: [] for name in ids_by_request}
    for name, ids in ids_by_request.items():
        engine.submit(GenerationRequest(request_id=name, prompt_token_ids=tuple(ids), sampling=params))
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            output[event.request_id].extend(event.token_ids)
    return output


def recorded(engine: Engine, name: str) -> torch.Tensor:
    logits: torch.Tensor = engine.runner.logits_of(name)  # type: ignore[attr-defined]
    return logits


def teacher_forced(model: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Logits that `transformers` would sample each output token from, float32 [output, vocab]."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt + output])).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def check(
    model: Any, engine: Engine, ids_by_request: dict[str, list[int]], tolerance: float, gap_tolerance: float
) -> dict[str, list[int]]:
    output = generate(engine, ids_by_request)
    for name, ids in ids_by_request.items():
        theirs = teacher_forced(model, ids, output[name])
        assert (recorded(engine, name) - theirs).abs().max() <= tolerance, name
        check_greedy(theirs, output[name], gap_tolerance)
    return output


def check_greedy(theirs: torch.Tensor, tokens: list[int], gap_tolerance: float) -> None:
    """Each token is the reference's greedy choice, unless its best two are as close as the tolerance."""
    top = theirs.topk(2).values
    for position, token in enumerate(tokens):
        if theirs[position].argmax() != token:
            assert top[position, 0] - theirs[position, token] <= gap_tolerance, f"token {position}"


SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, list[int]]]] = {
    "batch": ({}, prompts([5, 37, 61, 1])),
    "chunked": ({"max_batch_tokens": 16, "max_running": 4}, prompts([61, 37])),
    "shared prefix": ({}, prompts([9, 20, 3], shared=45)),
}


@pytest.mark.parametrize("scenario", ["chunked", *rarer(["batch", "shared prefix"])])
def test_float32_logits_and_tokens(checkpoint: tuple[Path, Any], scenario: str) -> None:
    directory, model = checkpoint
    options, ids_by_request = SCENARIOS[scenario]
    engine = make_engine(directory, torch.float32, **options)
    output = check(model, engine, ids_by_request, FLOAT32_TOLERANCE, FLOAT32_TOLERANCE)
    for name, ids in ids_by_request.items():
        check_generated(model, ids, output[name])


def test_float32_after_a_prefix_hit(checkpoint: tuple[Path, Any]) -> None:
    directory, model = checkpoint
    engine = make_engine(directory, torch.float32)
    ids = prompts([53])["r0"]
    check(model, engine, {"first": ids}, FLOAT32_TOLERANCE, FLOAT32_TOLERANCE)  # alone in its steps
    ids_by_request = {"again": ids, "branch": [*ids[:40], 1, 2, 3]}
    output = check(model, engine, ids_by_request, FLOAT32_TOLERANCE, FLOAT32_TOLERANCE)
    assert engine.num_tokens["cached"] == 52 + 40
    check_generated(model, ids_by_request["branch"], output["branch"])


def check_generated(model: Any, ids: list[int], tokens: list[int]) -> None:
    """The tokens are those of `transformers`' own greedy `generate`, up to a near tie, where either may win."""
    best, second = teacher_forced(model, ids, tokens).topk(2).values.unbind(1)
    is_near = (best - second <= FLOAT32_TOLERANCE).tolist()
    end = [*is_near, True].index(True)
    assert tokens[:end] == generated(model, ids)[:end]


def generated(model: Any, ids: list[int]) -> list[int]:
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


@pytest.mark.parametrize("scenario", ["batch", *rarer(["chunked", "shared prefix"])])
def test_bfloat16_logits_and_tokens(checkpoint: tuple[Path, Any], scenario: str) -> None:
    """Experts are compared by their error alone (test_families): near ties of a router choose others."""
    directory, model = checkpoint
    if load_model_config(directory).experts is not None:
        pytest.skip("a router's near ties in bfloat16")
    half = copy.deepcopy(model).to(torch.bfloat16)
    options, ids_by_request = SCENARIOS[scenario]
    engine = make_engine(directory, torch.bfloat16, **options)
    output = check(half, engine, ids_by_request, BF16_TOLERANCE, BF16_GAP_TOLERANCE)
    for name, ids in ids_by_request.items():
        exact = teacher_forced(model, ids, output[name])
        ours, theirs = (
            (logits - exact).square().mean().sqrt()
            for logits in (recorded(engine, name), teacher_forced(half, ids, output[name]))
        )
        assert ours <= BF16_RMS_TOLERANCE
        assert ours <= 1.25 * theirs


def test_float16_holds_a_channel_beyond_its_range(tmp_path: Path) -> None:
    """As many models have them behind their first layers: float64 gives numbers, `transformers` in float16 none."""
    model = make_model("llama-biased")
    layers = model.model.layers
    with torch.no_grad():
        for layer in layers[:2]:
            layer.mlp.down_proj.bias[3] = 6e4
        for module in (*layers[1].children(), *layers[2].children(), model.model.norm):
            if "RMSNorm" in type(module).__name__:  # as such a model learns: all else is small beside that channel
                module.weight *= 2000 if module is not model.model.norm else 8000
                module.weight[3] = 0.1
    model.save_pretrained(tmp_path)
    wide, half = copy.deepcopy(model).double(), copy.deepcopy(model).half()
    ids_by_request = prompts([5, 37])
    output = generate(make_engine(tmp_path, torch.float16), ids_by_request)
    for name, ids in ids_by_request.items():
        exact = teacher_forced(wide, ids, output[name])
        assert exact.std() > 0.5
        check_greedy(exact, output[name], 0.05)
        assert not teacher_forced(half, ids, output[name]).isfinite().all()
