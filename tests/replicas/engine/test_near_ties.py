"""Answers of mneme-tiny in float32 that tests on servers compare between batches: none of them has a near tie.

Attention is summed in an order that depends on the batch (docs/decisions/reproducibility.md), so logits are rounded
otherwise. Where the two best tokens are further apart than that everywhere, an answer is the same on any processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mneme import LLM, SamplingParams
from mneme.replicas.llm import RequestOutput
from tests.e2e import test_cache_tier, test_host_tier, test_serve, test_sessions
from tests.e2e.nodes import test_scaling, test_survival

pytestmark = [pytest.mark.engine, pytest.mark.slow]  # looked at when prompts of end-to-end tests change

NEAR_TIE = 4e-4  # twice the tolerance of float32 logits in checkpoints.py; rounding was seen to move leads by 1.4e-5
FURTHER = "And then?"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("mneme-tiny", dtype="float32")


def told(num_tokens: int, **more: Any) -> SamplingParams:
    """Greedy, as the server is asked, with the best three at each place: one of them may be barred there."""
    asked = {"temperature": 0, "max_tokens": num_tokens, "min_tokens": num_tokens, "logprobs": 3}
    return SamplingParams(**asked | more)


def least_lead(outputs: Sequence[RequestOutput]) -> float:
    """By how much, at the closest place of all answers, the chosen token's log-probability is above the next one's."""
    leads = []
    for output in outputs:
        for entry in output.outputs[0].logprobs or ():
            others = [value for token_id, value in entry.top if token_id != entry.token_id and value <= entry.logprob]
            leads.append(entry.logprob - max(others))
    return min(leads)


@pytest.mark.parametrize(
    ("turns", "params"),
    [
        ([test_cache_tier.STORY, FURTHER], told(test_cache_tier.NUM_OUTPUT)),
        ([f"Alike. {test_host_tier.STORY}", FURTHER], told(16)),
        ([test_survival.STORY, test_survival.QUESTION], told(test_survival.NUM_OUTPUT, ignore_eos=True)),
        ([test_survival.QUESTION], told(test_survival.NUM_OUTPUT, ignore_eos=True)),
        ([test_sessions.STORY, FURTHER], told(24, min_tokens=0)),
    ],
    ids=["cache tier", "host tier", "survival", "survival, one turn", "sessions"],
)
def test_conversations(llm: LLM, turns: list[str], params: SamplingParams) -> None:
    messages: list[dict[str, str]] = []
    for text in turns:
        messages.append({"role": "user", "content": text})
        output = llm.chat(messages, params, session_id=f"{len(turns[0])}, {params.max_tokens}")
        assert least_lead([output]) > NEAR_TIE
        messages.append({"role": "assistant", "content": output.outputs[0].text})


def test_streams_over_a_kill(llm: LLM) -> None:
    messages = [[{"role": "user", "content": f"{number}. {test_serve.PROMPT}"}] for number in range(6)]
    assert least_lead(llm.chat(messages, told(300))) > NEAR_TIE


def test_completions_while_replicas_come_and_go(llm: LLM) -> None:
    assert least_lead(llm.generate([test_scaling.PROMPT], told(test_scaling.SHORT, ignore_eos=True))) > NEAR_TIE
    assert least_lead(llm.generate(list(test_scaling.PROMPTS), told(test_scaling.LONG, ignore_eos=True))) > NEAR_TIE
