"""Documents reused in place on a real decoder: the logits are those of the dense computation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mneme.cachetier.config import CacheConfig
from mneme.cachetier.names import CostEdge, Miss
from mneme.kernels.segments import PRIVATE, Segments
from mneme.replicas.blend.gate import Gate
from mneme.replicas.blend.selectors import ReusedSpan, choose, count, filter_counts, first_share
from mneme.replicas.config import EngineConfig
from mneme.replicas.documents import BlendOptions, DocumentSpan
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.attention_mass import NUM_ASKING
from mneme.replicas.model.graphs import MakeGraphs
from mneme.replicas.request import GenerationRequest, SamplingParams
from tests.replicas.checkpoints import RecordingRunner, decoder_of, write_checkpoint
from tests.replicas.chunk_stores import CHUNK_TOKENS, FakeStore, SlowRows
from tests.replicas.dense_blend import DenseBlend
from tests.replicas.tiered_engine import (
    PAGE_SIZE,
    answers,
    draw,
    full_prefill,
    logits_of,
    make_cached_engine,
    run,
    submit,
    usages,
)

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
INT8_KV_TOLERANCE = 0.15  # of logits of order 1
SINK = (7,)
WITH_SINK = SimpleNamespace(sink_ids=SINK, decode=None)
SYSTEM, DOCUMENTS, QUESTION = [*SINK, *draw(1, 21)], [draw(2, 50), draw(3, 37), draw(4, 64)], draw(5, 9)


@pytest.fixture(scope="module", params=["llama-2", "llama-yarn", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    return directory, write_checkpoint(request.param, directory)


def engine_of(
    directory: Path,
    num_pages: int = 64,
    device: str = "cpu",
    make_graphs: MakeGraphs | None = None,
    kv_dtype: torch.dtype | None = None,
    **options: Any,
) -> Engine:
    decoder, sizes = decoder_of(directory, device=device), (num_pages, PAGE_SIZE)
    runner = RecordingRunner(decoder, *sizes, make_graphs, kv_dtype=kv_dtype, num_host_pages=64)
    tokenizer: Any = SimpleNamespace(sink_ids=SINK, decode=None)
    return Engine(runner, tokenizer, EngineConfig(page_size=PAGE_SIZE, **options))


def prompt_of(order: list[int], text: tuple[int, ...] = (11, 12, 13)) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids and document spans of a prompt with text between its documents."""
    ids, spans = list(SYSTEM), []
    for index in order:
        spans.append((len(ids), len(ids) + len(DOCUMENTS[index])))
        ids += [*DOCUMENTS[index], *text]
    return ids[: len(ids) - len(text)] + QUESTION, spans


def ask(
    engine: Engine, name: str, prompt: tuple[list[int], list[tuple[int, int]]], num_new: int = 4, **blend: Any
) -> None:
    ids, spans = prompt
    documents = tuple(DocumentSpan(start, end, "", start, end) for start, end in spans)
    options = BlendOptions(**{"mode": "selective", "min_tokens": 1, **blend})
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, seed=5)
    request = {"request_id": name, "prompt_token_ids": tuple(ids), "sampling": params}
    engine.submit(GenerationRequest(**request, documents=documents, blend=options))


def dense(
    model: Any, prompt: tuple[list[int], list[tuple[int, int]]], output: list[int], selector: Any, ratio: float
) -> torch.Tensor:
    ids, spans = prompt
    oracle = DenseBlend(model, SINK)
    scores = oracle.question_scores(ids, spans, NUM_ASKING).numpy()
    num_layers, share, counts = model.config.num_hidden_layers, ratio, {}
    if selector == "hkvd" and 0 < ratio < 1:
        scores, share = oracle.key_deviation(ids, spans).numpy(), first_share(num_layers, ratio)
        num_first = count(sum(end - start for start, end in spans), share)
        counts = filter_counts(num_layers, num_first, ratio)
    computed = choose(selector, [ReusedSpan(*span) for span in spans], share, 5, scores).tolist()
    return oracle.logits([*ids, *output[:-1]], spans, computed, counts)[-len(output) :]


def error_of(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs).abs().max())


@pytest.mark.parametrize(
    ("selector", "ratio", "max_batch_tokens"),
    [("none", 0.0, 24), ("random", 0.3, 40), ("query", 0.15, 2048), ("query", 0.4, 40), ("query+first-k", 0.3, 2048)],
)
def test_logits_are_those_of_the_dense_computation(
    checkpoint: tuple[Path, Any], selector: str, ratio: float, max_batch_tokens: int
) -> None:
    directory, model = checkpoint
    engine = engine_of(directory, max_batch_tokens=max_batch_tokens, max_running=8)
    for name, order in (("a", [0, 1, 2]), ("b", [2, 0, 2, 1])):
        prompt = prompt_of(order)
        ask(engine, name, prompt, selector=selector, ratio=ratio)
        output = answers(run(engine))[name]
        assert error_of(logits_of(engine, name), dense(model, prompt, output, selector, ratio)) <= TOLERANCE


@pytest.mark.parametrize(("selector", "ratio", "max_batch_tokens"), [("none", 0.0, 24), ("random", 0.3, 40)])
def test_documents_in_8_bits_are_near_the_dense_computation(
    checkpoint: tuple[Path, Any], selector: str, ratio: float, max_batch_tokens: int
) -> None:
    """Selectors that choose the same tokens whatever KV is rounded to; the same pages at several places."""
    directory, model = checkpoint
    engine = engine_of(directory, kv_dtype=torch.int8, max_batch_tokens=max_batch_tokens, max_running=8)
    for name, order in (("a", [0, 1, 2]), ("b", [2, 0, 2, 1])):
        prompt = prompt_of(order)
        ask(engine, name, prompt, selector=selector, ratio=ratio)
        output = answers(run(engine))[name]
        assert 0 < error_of(logits_of(engine, name), dense(model, prompt, output, selector, ratio)) < INT8_KV_TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize(("selector", "ratio"), [("none", 0.0), ("first-k", 0.2), ("query", 0.3), ("hkvd", 0.3)])
def test_a_device_computes_what_dense_computation_does(
    checkpoint: tuple[Path, Any], selector: str, ratio: float
) -> None:
    directory, model = checkpoint
    engine = engine_of(directory, device="cuda:0")
    for name, order in (("a", [0, 1, 2]), ("b", [2, 0, 2, 1])):
        prompt = prompt_of(order)
        ask(engine, name, prompt, selector=selector, ratio=ratio)
        output = answers(run(engine))[name]
        assert error_of(logits_of(engine, name).cpu(), dense(model, prompt, output, selector, ratio)) <= 1e-3


@pytest.mark.parametrize(("selector", "ratio"), [("all", None), ("hkvd", 1.0)])
def test_where_all_is_computed_anew_it_equals_a_full_prefill(
    checkpoint: tuple[Path, Any], selector: str, ratio: float | None
) -> None:
    directory, _ = checkpoint
    engine = engine_of(directory)
    prompt = prompt_of([1, 0, 2])
    ask(engine, "a", prompt, selector=selector, ratio=ratio)
    output = answers(run(engine))["a"]
    expected, logits = full_prefill(decoder_of(directory), prompt[0], 4)
    assert output == expected
    assert error_of(logits_of(engine, "a"), logits.double()) <= TOLERANCE


@pytest.mark.parametrize(("selector", "max_batch_tokens"), [("random", 48), ("query", 48), ("hkvd", 400)])
def test_others_in_the_batch_answer_as_without_it(
    checkpoint: tuple[Path, Any], selector: str, max_batch_tokens: int
) -> None:
    directory, model = checkpoint
    prompts = {"ordinary": draw(9, 70), "shared": SYSTEM + draw(8, 30), "exact": prompt_of([2, 1])[0]}
    alone = {name: full_prefill(decoder_of(directory), ids, 6) for name, ids in prompts.items()}
    engine = engine_of(directory, max_batch_tokens=max_batch_tokens, max_running=8)
    blends = {"x": prompt_of([1, 2, 0]), "y": prompt_of([0, 0, 1])}
    for name, prompt in blends.items():
        ask(engine, name, prompt, 6, selector=selector, ratio=0.2)
    for name, ids in prompts.items():
        submit(engine, name, ids, 6)
    said = answers(run(engine))
    for name, (tokens, logits) in alone.items():
        assert said[name] == tokens
        assert error_of(logits_of(engine, name), logits.double()) <= TOLERANCE
    for name, prompt in blends.items():
        assert error_of(logits_of(engine, name), dense(model, prompt, said[name], selector, 0.2)) <= TOLERANCE


def test_keys_that_are_compared_in_several_steps_choose_the_same(checkpoint: tuple[Path, Any]) -> None:
    directory, _ = checkpoint
    chosen = []
    for max_batch_tokens in (2048, 48):
        engine = engine_of(directory, max_batch_tokens=max_batch_tokens, max_running=8)
        ask(engine, "a", prompt_of([1, 2, 0]), 1, selector="hkvd", ratio=0.3)
        child = next(iter(engine.scheduler.waiting))
        sequence = engine.scheduler.gathering.parent_by_child[child]  # whose documents are computed first
        run(engine)
        chosen.append(sequence.blend.narrowed.tolist())
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == count(151, first_share(3, 0.3))


@pytest.mark.parametrize("fails", [False, True])
def test_documents_come_from_the_cache_tier_and_nothing_behind_them_goes_there(
    checkpoint: tuple[Path, Any], fails: bool
) -> None:
    """A lost layer is a document computed here."""
    directory, model = checkpoint
    prompt, store, decoder = prompt_of([2, 0], ()), FakeStore(), decoder_of(directory)
    for name in ("first", "again"):
        engine = make_cached_engine(decoder, store, tokenizer=WITH_SINK)
        ask(engine, name, prompt, selector="first-k", ratio=0.1)
        events = run(engine)
        output = answers(events)[name]
        logits = logits_of(engine, name)[-len(output) :]  # a step whose load failed had some too
        assert error_of(logits, dense(model, prompt, output, "first-k", 0.1)) <= TOLERANCE
        assert (usages(events)[name].host_tokens > 64) == (name == "again" and not fails)
        engine.close()
        exact = [[*SINK, *DOCUMENTS[0]], [*SINK, *DOCUMENTS[2]], SYSTEM]
        for chunk in store.chunks.values():
            assert any(chunk.header.token_ids.tolist() in (ids[:64], ids[64:]) for ids in exact)
        if fails:
            store.fault = lambda header, layer: Miss.SHORT if layer == 1 else None


class SlowLoads(SlowRows):
    """The tier is slower still than rows, and they are loaded all the same."""

    def edge_s(self, edge: CostEdge, num_bytes: int, num_chunks: float = 1) -> float:
        return 1e6


def test_auto_computes_more_anew_while_documents_are_loaded(checkpoint: tuple[Path, Any]) -> None:
    directory, _ = checkpoint
    store, decoder = FakeStore(), decoder_of(directory)
    gate = Gate({"first-k": 0.1}, "", (0.1, 0.3, 0.5))
    config = CacheConfig(chunk_tokens=CHUNK_TOKENS, load="always")
    for name in ("first", "again"):
        engine = make_cached_engine(decoder, store, costs=SlowLoads(), config=config, gate=gate, tokenizer=WITH_SINK)
        ask(engine, name, prompt_of([2, 0] if name == "first" else [0, 2]), mode="auto")
        blend = usages(run(engine))[name].blend
        engine.close()
        if name == "first":  # its documents are computed by themselves behind the answer, and saved
            assert blend.declined == "first_asked"
            continue
        assert (blend.mode, blend.selector, blend.ratio, blend.is_measured) == ("selective", "first-k", 0.5, True)
        assert blend.why.startswith("the quality report allows it; predicted: ")


@pytest.mark.parametrize("max_batch_tokens", [400, 64])
def test_layers_read_shared_pages_where_private_ones_hold_copies(
    checkpoint: tuple[Path, Any], max_batch_tokens: int
) -> None:
    """In every layer each token is read once: from the private slot only where it was computed anew there."""
    directory, model = checkpoint
    engine = engine_of(directory, max_batch_tokens=max_batch_tokens, max_running=8)
    steps: list[tuple[Any, set[int | None]]] = []
    forward = engine.runner.forward

    def note(inputs: Any) -> torch.Tensor:
        kept = [each for some in engine.scheduler.running if some.path is not None for each in some.path.root.kept]
        steps.append((inputs, {each.page.ids[0] for each in kept if each.page.positions is not None}))
        return forward(inputs)

    engine.runner.forward = note  # type: ignore[method-assign]
    prompt = prompt_of([1, 2, 0])
    ask(engine, "a", prompt, selector="hkvd", ratio=0.3)
    output = answers(run(engine))["a"]
    inputs, private = steps[-1]
    num_private: dict[int, int] = {}
    for layer, plan in inputs.plans.items():
        (table,) = plan.page_tables
        seen = [
            (int(page), int(engine.runner.pool.slot_position[int(page) * PAGE_SIZE + offset]) + int(delta))
            for page, delta, mask in zip(table.page_ids, table.deltas, table.masks, strict=True)
            for offset in range(PAGE_SIZE)
            if int(mask) >> offset & 1
        ]
        end = int(inputs.positions[0]) + 1
        assert sorted(position for _, position in seen if position < end) == list(range(end))
        num_private[layer] = sum(page in private for page, _ in seen)
    num_layers = model.config.num_hidden_layers
    num_first = count(sum(map(len, DOCUMENTS)), first_share(num_layers, 0.3))
    counts = filter_counts(num_layers, num_first, 0.3)
    assert list(num_private) == [0, 1, *counts]
    assert num_private[1] - num_private[0] == num_first
    if max_batch_tokens == 400:  # tokens are chosen among the rows of one step
        assert {layer: num_private[layer] - num_private[0] for layer in counts} == counts
        assert error_of(logits_of(engine, "a"), dense(model, prompt, output, "hkvd", 0.3)) <= TOLERANCE


def test_after_a_restart_auto_finds_what_it_would_with_reuse_off(checkpoint: tuple[Path, Any]) -> None:
    """A tier has the prompt as an exact prefix, and its documents by themselves: no less is cached than without."""
    directory, _ = checkpoint
    store, decoder, prompt = FakeStore(), decoder_of(directory), prompt_of([2, 0])
    gate, config = Gate({"first-k": 0.1}, "", (0.1,)), CacheConfig(chunk_tokens=CHUNK_TOKENS, load="always")
    found = {}
    for name, mode in (("first", "auto"), ("auto", "auto"), ("off", "off")):
        engine = make_cached_engine(decoder, store, config=config, gate=gate, tokenizer=WITH_SINK)
        ask(engine, name, prompt, mode=mode)
        found[name] = usages(run(engine))[name]
        engine.close()
    assert found["auto"].host_tokens == found["off"].host_tokens > len(DOCUMENTS[2])
    assert [found[name].blend.declined for name in ("first", "auto", "off")] == ["first_asked", "exact", "off"]


def test_requests_of_one_batch_read_a_document_once(checkpoint: tuple[Path, Any]) -> None:
    """Every page of a document that all see is in one segment of the attention plan, with a delta for each of them."""
    directory, _ = checkpoint
    engine = engine_of(directory, max_running=8)
    plans: list[Any] = []
    forward = engine.runner.forward

    def note(inputs: Any) -> torch.Tensor:
        plans.append(inputs.plan)
        return forward(inputs)

    engine.runner.forward = note  # type: ignore[method-assign]
    for index, order in enumerate(([0, 1, 2], [2, 0, 1], [1, 2, 0])):
        ask(engine, f"r{index}", prompt_of(order), 8, mode="full_reuse")
    run(engine)
    plan = next(plan for plan in plans if plan.num_rows == plan.num_sequences == 3)  # all decode
    found = plan.segments
    assert isinstance(found, Segments)
    num_readers: dict[int, int] = {}
    segments_of: dict[int, set[int]] = {}
    for page, segment in zip(found.references.page_id.tolist(), found.segment_of_ref.tolist(), strict=True):
        num_readers[page] = num_readers.get(page, 0) + 1
        segments_of.setdefault(page, set()).add(segment)
    of_all = {page for page, number in num_readers.items() if number == 3}
    assert len(of_all) >= sum(len(document) // PAGE_SIZE for document in DOCUMENTS)
    for page in of_all:
        (segment,) = segments_of[page]
        assert segment != PRIVATE
    deltas = [set(segment.deltas.tolist()) for segment in found.segments if len(segment.sequences) == 3]
    assert max(map(len, deltas)) == 3
