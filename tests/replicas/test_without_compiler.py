"""A CPU without a compiler: torch and numpy in the place of the compiled kernels, wherever the engine calls those.

Kernel by kernel both are held against references in `tests/kernels` and `tests/cachetier/host_pages`; here are all
together.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mneme import LLM, SamplingParams
from tests.kernels.cases import needs_native
from tests.kernels.native.native_variants import use_library

pytestmark = pytest.mark.engine

NEW: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
GREEDY = SamplingParams(temperature=0, **NEW)
STORY = "Once upon a time there was a small server that kept what it had read. " * 4
PROMPTS = [STORY + end for end in ("It", "One day", "Nobody")]


def make_llm(**config: Any) -> LLM:
    return LLM("mneme-tiny", device="cpu", dtype="float32", **config)


def of_params(**params: Any) -> Callable[[Path], list[object]]:
    """Three prompts with one beginning, twice: the second time they are cached."""

    def answers(_: Path) -> list[object]:
        with make_llm() as llm:
            options = [SamplingParams(seed=seed, **NEW, **params) for seed in range(3)]
            return [each.outputs[0].token_ids for _ in range(2) for each in llm.generate(PROMPTS, options)]

    return answers


def turns(_: Path) -> list[object]:
    """Three turns of a session that outgrows its context: keys are used at other places than their own."""
    found: list[object] = []
    with make_llm(config={"max_context": 128}) as llm:
        ids = llm.tokenizer.encode(STORY, add_special_tokens=True)[:60]
        for _ in range(3):
            truncation = {"strategy": "reuse_kv", "ratio": 0.5}
            (out,) = llm.generate([ids], GREEDY, session_ids=["s"], truncation=truncation)
            ids = [*ids, *out.outputs[0].token_ids, *ids[:20]]
            found.append((out.outputs[0].token_ids, out.metrics.cached_tokens))
    return found


def host_tier(_: Path) -> list[object]:
    """A pool that holds little: pages go to host memory and come back."""
    with make_llm(config={"num_pages": 16, "host_cache_bytes": 1 << 24}) as llm:
        outs = [out for _ in range(2) for prompt in PROMPTS for out in llm.generate([prompt * 2], GREEDY)]
        return [(out.outputs[0].token_ids, out.metrics.cached_tokens) for out in outs]


def cache_tier(folder: Path) -> list[object]:
    """What one engine has left on the disk, another begins with."""
    cache = {"chunk_tokens": 64, "load": "always", "disk": {"folder": str(folder), "capacity_bytes": 1 << 26}}
    found: list[object] = []
    for _ in range(2):
        with make_llm(cache=cache) as llm:
            outs = llm.generate(PROMPTS, GREEDY)
        found += [(out.outputs[0].token_ids, out.metrics.cached_tokens) for out in outs]
    return found


ANSWERS: dict[str, Callable[[Path], list[object]]] = {
    "greedy": of_params(temperature=0),
    "whole draws": of_params(temperature=0.9),
    "truncated draws": of_params(temperature=0.9, top_p=0.9, top_k=40, min_p=0.01),
    "penalties": of_params(temperature=0, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={400: 2.0}),
    "turns": turns,
    "host tier": host_tier,
    "cache tier": cache_tier,
}


@needs_native
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_those_of_compiled_kernels(name: str, tmp_path: Path) -> None:
    compiled = ANSWERS[name](tmp_path / "compiled")
    with use_library(None):
        assert ANSWERS[name](tmp_path / "plain") == compiled


@needs_native
def test_log_probabilities_are_those_of_compiled_kernels() -> None:
    params = SamplingParams(temperature=0, logprobs=3, **NEW)

    def told() -> list[float]:
        with make_llm() as llm:
            return [each.logprob for each in llm.generate(PROMPTS[0], params)[0].outputs[0].logprobs]

    compiled = told()
    with use_library(None):
        assert told() == pytest.approx(compiled, abs=1e-3)
