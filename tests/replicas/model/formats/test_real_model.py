"""A real checkpoint: SmolLM2-135M-Instruct out of its package, where that can be installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mneme import LLM, SamplingParams
from mneme.errors import CheckpointError
from mneme.replicas.model.directory import PACKAGED, load_model_config, model_directory
from mneme.replicas.model.weights import Checked, SafetensorsFiles, open_files

pytestmark = [pytest.mark.engine, pytest.mark.slow]

QUESTIONS = ["What is the capital of France?", "Name three fruits.", "What colour is the sky on a clear day?"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    try:
        model_directory("smollm2")
    except CheckpointError as error:
        pytest.skip(f"{PACKAGED['smollm2'].requirement} cannot be had here: {error}")
    with LLM("smollm2", dtype="float32", config={"max_context": 1024, "max_running": 8, "weights": "dense"}) as llm:
        yield llm


def test_it_answers(llm: LLM) -> None:
    talks = [[{"role": "user", "content": question}] for question in QUESTIONS]
    answers = [each.outputs[0].text for each in llm.chat(talks, SamplingParams(temperature=0, max_tokens=24))]
    assert "Paris" in answers[0]
    assert "blue" in answers[2].lower()
    assert all(answer.strip() for answer in answers)


def test_a_second_turn_finds_the_first(llm: LLM) -> None:
    talk = [{"role": "user", "content": QUESTIONS[1]}]
    greedy = SamplingParams(temperature=0, max_tokens=24)
    first = llm.chat(talk, greedy)
    talk += [{"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "And three more?"}]
    second = llm.chat(talk, greedy)
    assert second.num_cached_tokens >= len(first.prompt_token_ids)


def test_its_tokens_are_those_of_transformers(llm: LLM) -> None:
    """The same dequantized tensors in `transformers`' model; 40 greedy tokens of each question, but for near ties."""
    from contextlib import ExitStack

    import transformers

    directory = model_directory("smollm2")
    config = load_model_config(directory)
    described = transformers.AutoConfig.from_pretrained(directory)
    model = transformers.LlamaForCausalLM(described).eval()
    with ExitStack() as stack:
        files = open_files(directory, torch.device("cpu"), torch.float32, stack)
        assert not isinstance(files, SafetensorsFiles)
        assert Checked(files, torch.float32).has("model.norm.weight")
        state = {name: files.tensor(name) for name in model.state_dict() if files.has(name)}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    assert config.tied_embeddings
    for question in QUESTIONS:
        answer = llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0, max_tokens=40))
        ids, said = list(answer.prompt_token_ids), list(answer.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([ids + said])).logits[0, len(ids) - 1 : -1]
        best = logits.max(-1).values
        chosen = logits.gather(-1, torch.tensor(said)[:, None])[:, 0]
        assert (best - chosen).max() <= 1e-3, question
