"""Each family against `transformers` in float32: prefill, decode, prefix hits, holes and tiers. |difference| <= 2e-4.

Answers are longer than a page. A family that is added brings a line of `checkpoints.py` and one here.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from mneme.errors import InvalidRequest
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.families.table import FAMILIES
from mneme.replicas.truncation import Truncation
from tests.replicas.checkpoints import FLOAT32_TOLERANCE, decoder_of, make_model, teacher_forced, write_checkpoint
from tests.replicas.chunk_stores import FakeStore
from tests.replicas.tiered_engine import (
    answers,
    draw,
    dropped_everywhere,
    logits_of,
    lose_range,
    make_cached_engine,
    make_engine,
    run,
    runner_of,
    submit,
    usages,
)

pytestmark = pytest.mark.engine

MODELS = [
    "falcon-7b", "falcon-40b", "gemma-2", "gemma-3", "gpt-oss", "llama-3", "llama-biased", "llama-linear",
    "llama-yarn", "ministral", "mistral", "mixtral", "opt", "phi-3", "phi-4-mini", "qwen2", "qwen2-moe", "qwen2-window",
    "qwen3", "qwen3-moe",
]  # fmt: skip
NUM_OUT = 20
# The logits have a standard deviation of 1.2; against float32 both sides are off by 0.02 to 0.05 in the mean square.
BF16_RMS_TOLERANCE = 0.06


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Any, Path]:
    directory = tmp_path_factory.mktemp(request.param)
    theirs = write_checkpoint(request.param, directory)
    return decoder_of(directory), theirs, directory


def ask(engine: Engine, theirs: Any, ids_by_name: dict[str, list[int]]) -> dict[str, dict[str, int]]:
    """Answer prompts in one batch, and compare each logit with `transformers`; returns the usage's kinds of KV."""
    for name, ids in ids_by_name.items():
        submit(engine, name, ids, NUM_OUT)
    events = run(engine)
    for name, tokens in answers(events).items():
        expected = teacher_forced(theirs, ids_by_name[name], tokens)
        assert (logits_of(engine, name) - expected).abs().max() <= FLOAT32_TOLERANCE, name
        assert tokens == expected.argmax(-1).tolist()
    return {name: usage.kv_details() for name, usage in usages(events).items()}


@pytest.mark.parametrize("max_batch_tokens", [2048, 16])
def test_prefill_decode_and_prefix_hits(model: tuple[Decoder, Any, Path], max_batch_tokens: int) -> None:
    decoder, theirs, _ = model
    engine = make_engine(decoder, num_host_pages=0, max_batch_tokens=max_batch_tokens, max_running=8)
    head = draw(1, 45)
    ask(engine, theirs, {"long": [*head, *draw(2, 40)], "short": draw(3, 5), "one": draw(4, 1)})
    found = ask(engine, theirs, {"hit": [*head, *draw(5, 9)], "again": [*head, *draw(2, 40)]})
    assert found["hit"]["device"] == 45
    assert found["again"]["device"] == 84


def test_holes_and_host_pages(model: tuple[Decoder, Any, Path]) -> None:
    decoder, theirs, _ = model
    engine = make_engine(decoder, copy_out_below=0)
    ids = draw(6, 120)
    ask(engine, theirs, {"first": ids})
    lose_range(engine, ids, 32, 64, "dropped")
    lose_range(engine, ids, 80, 96, "host")
    assert dropped_everywhere(engine, ids) == list(range(32, 64))
    found = ask(engine, theirs, {"again": [*ids, *draw(7, 8)]})["again"]
    if decoder.config.window is None:
        assert (found["dropped"], found["host"]) == (32, 16)
    runner_of(engine).close()


def test_chunks_of_another_engine(model: tuple[Decoder, Any, Path]) -> None:
    decoder, theirs, _ = model
    store, ids = FakeStore(), draw(8, 130)
    for name in ("saves", "loads"):
        engine = make_cached_engine(decoder, store)
        found = ask(engine, theirs, {name: ids})[name]
        engine.close()
    assert found["recomputed"] <= 130 - 128, found


def test_what_cannot_be_moved_is_refused(model: tuple[Decoder, Any, Path]) -> None:
    decoder, _, _ = model
    engine = make_engine(decoder, num_host_pages=0)
    moved = Truncation(keep_first=4)
    if decoder.config.immovable is None:
        submit(engine, "moved", draw(9, 20), 2, session_id="s", truncation=moved)
        assert len(answers(run(engine))["moved"]) == 2
        return
    with pytest.raises(InvalidRequest, match=r"learned positions|sliding-window"):
        submit(engine, "moved", draw(9, 20), 2, session_id="s", truncation=moved)
    submit(engine, "anew", draw(9, 20), 2, session_id="s", truncation=Truncation(strategy="recompute", keep_first=4))
    assert len(answers(run(engine))["anew"]) == 2


def test_bfloat16_is_as_near_as_transformers(model: tuple[Decoder, Any, Path]) -> None:
    """Against float32: the error of the logits of one prompt, whose tokens are given."""
    _, theirs, directory = model
    engine = make_engine(decoder_of(directory, torch.bfloat16), num_host_pages=0)
    ids = draw(10, 60)
    submit(engine, "r", ids, NUM_OUT)
    tokens = answers(run(engine))["r"]
    exact = teacher_forced(theirs, ids, tokens)
    half = teacher_forced(copy.deepcopy(theirs).to(torch.bfloat16), ids, tokens)
    ours, its = ((logits - exact).square().mean().sqrt() for logits in (logits_of(engine, "r"), half))
    assert ours <= max(1.25 * its, BF16_RMS_TOLERANCE)


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
    engine, ids = make_engine(decoder_of(tmp_path, torch.float16), num_host_pages=0), draw(11, 37)
    submit(engine, "r", ids, 64)
    tokens = answers(run(engine))["r"]
    exact = teacher_forced(wide, ids, tokens)
    assert exact.std() > 0.5
    chosen = exact.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert (exact.max(-1).values - chosen).max() <= 0.05  # greedy, but for near ties
    assert not teacher_forced(half, ids, tokens).isfinite().all()


def test_a_table_says_what_each_family_can_do() -> None:
    """docs/adding-a-model.md has a row for each."""
    text = (Path(__file__).parents[4] / "docs" / "adding-a-model.md").read_text()
    assert all(f"`{name}`" in text for name in FAMILIES)
