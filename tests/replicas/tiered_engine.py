"""Engines on small real models whose pages are moved about, and what the forest says of a prompt before it runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.policy.cost_model import CostModel
from mneme.replicas.blend.gate import NO_REPORT, Gate
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.build import chunk_layout, connect
from mneme.replicas.engine.engine import BLOCKED_S, Engine
from mneme.replicas.forest.forest import COPY_OUT_BELOW
from mneme.replicas.forest.tree import DEVICE, HOST, Page, common_prefix
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.request import GenerationRequest, PromptUsage, SamplingParams, TokenEvent
from tests.replicas.checkpoints import RecordingRunner, decoder_of, write_checkpoint
from tests.replicas.chunk_stores import CHUNK_TOKENS, FakeStore, SlowRows

PAGE_SIZE = 16
VOCAB_SIZE = 320

Place = tuple[Page, int]  # a token of the forest: page, offset in it


def load_decoder(name: str, directory: Path) -> Decoder:
    """A random checkpoint of `checkpoints.py`, float32."""
    write_checkpoint(name, directory)
    return decoder_of(directory)


def make_engine(
    decoder: Decoder,
    num_pages: int = 64,
    num_host_pages: int = 64,
    *,
    copy_out_below: float = COPY_OUT_BELOW,
    kv_dtype: torch.dtype | None = None,
    **options: Any,
) -> Engine:
    runner = RecordingRunner(decoder, num_pages, PAGE_SIZE, kv_dtype=kv_dtype, num_host_pages=num_host_pages)
    return Engine(runner, None, EngineConfig(page_size=PAGE_SIZE, **options), copy_out_below=copy_out_below)


def runner_of(engine: Engine) -> RecordingRunner:
    runner = engine.runner
    assert isinstance(runner, RecordingRunner)
    return runner


def submit(engine: Engine, name: str, ids: list[int], num_new: int, **more: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    engine.submit(GenerationRequest(request_id=name, prompt_token_ids=tuple(ids), sampling=params, **more))


def run(engine: Engine) -> list[TokenEvent]:
    """All events until nothing is left to do; each step leaves the forest sound, and no request fails."""
    events: list[TokenEvent] = []
    for _ in range(5_000):
        if not engine.scheduler.has_work:
            return events
        while engine.is_blocked:  # for some milliseconds
            time.sleep(BLOCKED_S)
        events += engine.step()
        engine.forest.check()
    raise AssertionError("the engine does not come to an end")


def answers(events: list[TokenEvent]) -> dict[str, list[int]]:
    """Output tokens by request; raises if one failed."""
    found: dict[str, list[int]] = {}
    for event in events:
        assert event.error is None, event
        found.setdefault(event.request_id, []).extend(event.token_ids)
    return found


def usages(events: list[TokenEvent]) -> dict[str, PromptUsage]:
    return {event.request_id: event.usage for event in events if event.usage is not None}


def logits_of(engine: Engine, name: str) -> torch.Tensor:
    """float32 [rows that were sampled from, vocab]"""
    return runner_of(engine).logits_of(name)


def full_prefill(
    decoder: Decoder, ids: list[int], num_new: int, kv_dtype: torch.dtype | None = None
) -> tuple[list[int], torch.Tensor]:
    """Tokens and logits of an engine that has seen nothing before."""
    engine = make_engine(decoder, num_host_pages=0, kv_dtype=kv_dtype)
    submit(engine, "fresh", ids, num_new)
    return answers(run(engine))["fresh"], logits_of(engine, "fresh")


def places(engine: Engine, ids: list[int]) -> list[Place]:
    """The tokens of the forest that a prompt finds, in order, with KV or without."""
    found: list[Place] = []
    page: Page | None = engine.forest.roots.get("")
    while page is not None:
        position = len(found)
        shared = common_prefix(page.tokens, position - page.start, ids, position, len(ids))
        found += [(page, position - page.start + i) for i in range(shared)]
        page = page.children.get((len(found), ids[len(found)])) if len(found) < len(ids) else None
    return found


def tier_of(place: Place) -> str:
    page, offset = place
    if offset < page.filled[DEVICE]:
        return "device"
    return "host" if offset < page.filled[HOST] else "dropped"


def lose_range(engine: Engine, ids: list[int], start: int, end: int, how: str) -> None:
    """Lose the pages with these tokens: "host": off the device; "dropped": away; "stale": as far as copied.

    Pages that somebody holds stay.
    """
    forest = engine.forest
    pages = [page for page, offset in places(engine, ids) if start <= page.start + offset < end and not page.refs]
    for page in dict.fromkeys(pages):
        if how == "host" and page.ids[DEVICE] is not None:
            assert forest.store.save(page)
        for tier in (forest.device, forest.host) if how == "dropped" else (forest.device,):
            if page.ids[tier.index] is not None:
                forest.store.drop(page, tier)
        forest.check()


def dropped_everywhere(engine: Engine, ids: list[int]) -> list[int]:
    """The positions of a prompt whose tokens are known and have no KV."""
    return [i for i, place in enumerate(places(engine, ids)) if tier_of(place) == "dropped"]


def draw(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(32, VOCAB_SIZE, (count,), generator=generator).tolist()


def fingerprint_of(decoder: Decoder, kv_dtype: torch.dtype | None = None) -> ModelFingerprint:
    config = decoder.config
    layout = chunk_layout(config, kv_dtype or torch.float32, CHUNK_TOKENS)
    inv_freq = () if config.rope is None else config.rope.inv_freq
    return ModelFingerprint(weights="00", layout=layout, inv_freq=inv_freq)


def make_cached_engine(
    decoder: Decoder,
    store: FakeStore,
    *,
    num_pages: int = 64,
    num_host_pages: int = 0,
    costs: CostModel | None = None,
    config: CacheConfig | None = None,
    gate: Gate = NO_REPORT,
    tokenizer: Any = None,
    kv_dtype: torch.dtype | None = None,
    **options: object,
) -> Engine:
    """An engine with a cache tier."""
    fingerprint, config = fingerprint_of(decoder, kv_dtype), config or CacheConfig(chunk_tokens=CHUNK_TOKENS)
    runner = RecordingRunner(decoder, num_pages, PAGE_SIZE, kv_dtype=kv_dtype, num_host_pages=num_host_pages)
    connector = connect(runner, store, fingerprint, costs or SlowRows(), config)
    connector.min_load_tokens = 1
    engine_config = EngineConfig(**{"page_size": PAGE_SIZE, "max_step_ms": 0, **options})  # type: ignore[arg-type]
    return Engine(runner, tokenizer, engine_config, connector=connector, gate=gate)
