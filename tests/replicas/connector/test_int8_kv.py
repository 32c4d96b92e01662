"""KV of 8 bits in every tier: what an engine computed are the bytes that it, or another, reads again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mneme import LLM, SamplingParams
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.decoder import Decoder
from tests.replicas.chunk_stores import FakeStore
from tests.replicas.tiered_engine import (
    PAGE_SIZE,
    answers,
    draw,
    full_prefill,
    lose_range,
    make_cached_engine,
    make_engine,
    places,
    run,
    runner_of,
    submit,
    tier_of,
    usages,
)

pytestmark = pytest.mark.engine

INT8, NUM_NEW = torch.int8, 6


def rows_of(engine: Engine, ids: list[int]) -> torch.Tensor:
    """int8 [K and V, layers, heads, tokens, head_dim + 4] of a prompt's tokens, which are on the device."""
    slots = []
    for page, offset in places(engine, ids):
        page_id = page.ids[0]
        assert page_id is not None
        slots.append(page_id * PAGE_SIZE + offset)
    pool = runner_of(engine).pool
    return torch.stack([pages.flatten(2, 3)[:, :, slots] for pages in (pool.k_pages, pool.v_pages)])


def test_logits_are_near_those_of_the_models_own_dtype(decoder: Decoder) -> None:
    """In one prefill, in parts, and by decoding; numbers of order 1."""
    ids = draw(1, 150)
    wanted = full_prefill(decoder, ids, 1)[1]
    for num_rows in (2048, 40):
        engine = make_engine(decoder, num_host_pages=0, kv_dtype=INT8, max_batch_tokens=num_rows, max_running=8)
        submit(engine, "a", ids, NUM_NEW)
        said = answers(run(engine))["a"]
        found = runner_of(engine).logits_of("a")
        assert 0 < (found[:1] - wanted).abs().max() < 0.1
        dense = full_prefill(decoder, ids + said[:-1], 1)[1]
        assert (found[-1:] - dense).abs().max() < 0.1


def test_a_page_comes_back_from_the_host_as_it_went(decoder: Decoder) -> None:
    ids = draw(2, 130)
    engine = make_engine(decoder, kv_dtype=INT8)
    submit(engine, "first", ids, NUM_NEW)
    told = [*ids, *answers(run(engine))["first"]][:-1]
    before = rows_of(engine, told)
    lose_range(engine, told, 0, 96, "host")
    assert [tier_of(place) for place in places(engine, told)[:96]] == ["host"] * 96
    submit(engine, "again", [*told, 40], NUM_NEW)
    run(engine)
    assert runner_of(engine).num_loaded == 6
    assert torch.equal(rows_of(engine, told), before)


def test_another_engine_has_the_same_bytes(decoder: Decoder) -> None:
    store, ids = FakeStore(), draw(3, 210)
    engine = make_cached_engine(decoder, store, kv_dtype=INT8)
    submit(engine, "first", ids, NUM_NEW)
    told = [*ids, *answers(run(engine))["first"]][:-1]
    before = rows_of(engine, told)
    submit(engine, "next", [*told, 40], NUM_NEW)
    wanted = answers(run(engine))["next"]
    engine.close()
    other = make_cached_engine(decoder, store, kv_dtype=INT8)
    submit(other, "next", [*told, 40], NUM_NEW)
    events = run(other)
    assert usages(events)["next"].host_tokens >= 192
    assert torch.equal(rows_of(other, told)[:, :, :, :192], before[:, :, :, :192])
    assert answers(events)["next"] == wanted
    other.close()
    chunk = max(store.chunks.values(), key=lambda each: each.header.num_tokens)
    num_rows = 2 * decoder.config.num_kv_heads * chunk.header.num_tokens
    assert chunk.layers[0].nbytes == num_rows * (decoder.config.head_dim + 4)


def test_traffic_that_moves_pages_is_answered_as_alone(decoder: Decoder) -> None:
    """Prompts that begin alike, in a pool that is too small: pages go to the host and to the tier, and come back.

    KV that is computed again in another shape may be rounded to the neighbouring number, so logits are compared.
    """
    prefix, store = draw(5, 60), FakeStore()
    prompts = {f"{i}": [*prefix[: 60 - 7 * (i % 3)], *draw(50 + i, 30 + 9 * i)] for i in range(8)}
    wanted = {name: full_prefill(decoder, ids, 1, INT8)[1] for name, ids in prompts.items()}
    engine = make_cached_engine(decoder, store, num_pages=20, num_host_pages=30, kv_dtype=INT8, max_batch_tokens=48,
                                max_running=5)  # fmt: skip
    for turn in "ab":
        for name, ids in prompts.items():
            submit(engine, turn + name, ids, NUM_NEW)
        assert len(answers(run(engine))) == len(prompts)
        for name, logits in wanted.items():
            found = runner_of(engine).logits_of(turn + name)[:1]
            assert (found - logits).abs().max() < 0.005
    assert runner_of(engine).num_saved > 0
    assert runner_of(engine).num_loaded > 0
    engine.close()


@pytest.mark.parametrize("kinds", [(INT8, None), (None, INT8)], ids=str)
def test_chunks_of_another_form_are_other_chunks(
    decoder: Decoder, kinds: tuple[torch.dtype | None, torch.dtype | None]
) -> None:
    store, ids = FakeStore(), draw(4, 200)
    for kv_dtype in kinds:
        engine = make_cached_engine(decoder, store, kv_dtype=kv_dtype)
        submit(engine, "a", ids, NUM_NEW)
        events = run(engine)
        assert usages(events)["a"].cached_tokens == 0
        assert answers(events)["a"] == full_prefill(decoder, ids, NUM_NEW, kv_dtype)[0]
        engine.close()
    layouts = {chunk.header.layout.dtype for chunk in store.chunks.values()}
    assert layouts == {"int8", "float32"}


def test_a_folder_keeps_both_forms_over_restarts(tmp_path: Path) -> None:
    """Each engine finds what engines of its form have left there, whoever came between; answers are those of before."""
    prompt, greedy = "The capital of France is a city on a river. " * 12, SamplingParams(temperature=0, max_tokens=12)
    disk = {"folder": str(tmp_path), "capacity_bytes": 1 << 26}
    said: dict[str, list[tuple[int, ...]]] = {"int8": [], "auto": []}
    cached: dict[str, list[int]] = {"int8": [], "auto": []}
    for kv_dtype in ("auto", "int8", "int8", "auto"):
        config = {"num_pages": 64, "page_size": 16, "kv_dtype": kv_dtype}
        cache = {"disk": disk, "host_bytes": 1 << 24, "chunk_tokens": 64, "load": "always"}
        with LLM(dtype="float32", config=config, cache=cache) as llm:
            (output,) = llm.generate([prompt], greedy)
            assert list(llm.stats["kv_bytes"]) == ["int8" if kv_dtype == "int8" else "float32"]
        said[kv_dtype].append(output.outputs[0].token_ids)
        cached[kv_dtype].append(output.num_cached_tokens)
    for kv_dtype in ("int8", "auto"):
        first, second = cached[kv_dtype]
        assert (first, second >= 64) == (0, True)
        assert said[kv_dtype][0] == said[kv_dtype][1]
