"""Pooled hidden states against `transformers`, beside other requests, in pieces, and computed once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mneme.cachetier.names import PUBLIC_SALT
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.runner import Runner
from mneme.replicas.request import GenerationRequest, Pooling, SamplingParams
from tests.replicas.checkpoints import decoder_of, write_checkpoint

ONE = SamplingParams(max_tokens=1, temperature=0, seed=0, ignore_eos=True)


@pytest.mark.parametrize("max_batch_tokens", [1024, 24])
def test_embeddings_are_the_hidden_states_of_transformers(tmp_path: Path, max_batch_tokens: int) -> None:
    reference = write_checkpoint("qwen2", tmp_path)
    config = EngineConfig(page_size=16, max_running=8, max_batch_tokens=max_batch_tokens)
    engine = Engine(Runner(decoder_of(tmp_path, torch.float32), num_pages=64, page_size=16), None, config)
    prompts = {"a": [5, 6, 7] * 15, "b": [9], "c": [5, 6, 7] * 15}
    pooling: dict[str, Pooling] = {"a": "mean", "b": "mean", "c": "last"}
    for salt in (PUBLIC_SALT, "t"):  # cached already, which is of no use
        engine.submit(GenerationRequest(request_id="known", prompt_token_ids=(5, 6, 7) * 15, sampling=ONE, salt=salt))
        while engine.has_work:
            engine.step()
    num_known = sum(engine.forest.resident("t", prompts["a"]))
    other = SamplingParams(max_tokens=12, temperature=0, seed=0, ignore_eos=True)
    engine.submit(GenerationRequest(request_id="other", prompt_token_ids=(5, 6, 7, 8), sampling=other))
    for name, ids in prompts.items():
        request = GenerationRequest(
            request_id=name, prompt_token_ids=tuple(ids), sampling=ONE, salt="t", pooling=pooling[name]
        )
        engine.submit(request)
    found = {}
    while engine.has_work:
        found |= {event.request_id: event.embedding for event in engine.step() if event.embedding is not None}
    assert found.keys() == prompts.keys()
    for name, ids in prompts.items():
        with torch.inference_mode():
            states = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        expected = states.mean(0) if pooling[name] == "mean" else states[-1]
        embedding = found[name]
        assert embedding is not None
        torch.testing.assert_close(torch.tensor(embedding), expected.float(), rtol=0, atol=2e-4)
    assert sum(engine.forest.resident("t", prompts["a"])) == num_known
    assert engine.forest.roots.keys() <= {"", "t", PUBLIC_SALT}
    engine.forest.check()
