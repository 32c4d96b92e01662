"""Two engines on their threads behind an `EngineClient`, with a runner that has no model, over one node's cache."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.testclient import TestClient

from mneme.cachetier.chunk.keys import prefix_lineage
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.node.cache import NodeCache
from mneme.cachetier.node.memory import ProcessMemory
from mneme.cachetier.node.node_admin import NodeAdmin
from mneme.errors import MnemeError, ReplicaUnavailable
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.commands import ManagedChunks
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.loop import EngineLoop
from mneme.replicas.queries import DeletePin, Query
from mneme.replicas.request import GenerationRequest, SamplingParams, StepMessage, TokenEvent
from tests.cachetier.chunks import CHUNK_TOKENS, FINGERPRINT, chunk_of
from tests.cluster.api_fixtures import TOKENIZER, api
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.replicas.fake_runner import FakeRunner

KEYS = {"api_keys": ("key-one-1234567890", "key-two-1234567890")}
ONE, TWO = ({"authorization": f"Bearer {key}"} for key in KEYS["api_keys"])


class TwoEngines(FakeEngineClient):
    """Two replicas; the second may have a smaller pool."""

    def __init__(
        self, num_pages: tuple[int, int] = (64, 64), *, has_tier: bool = True, names: tuple[str, str] = ("a", "b")
    ) -> None:
        super().__init__(TOKENIZER, names=names)
        config = CacheConfig(chunk_tokens=64, eviction="lru", tenant_bytes=1 << 19)
        self.cache = NodeCache(config, ProcessMemory(), 1 << 20, has_threads=False)
        self.tier = ManagedChunks(admin=NodeAdmin(self.cache, "node-1"), fingerprint=FINGERPRINT, tenant_bytes=1 << 19)
        self.loops: dict[str, EngineLoop] = {}
        self.silent: set[str] = set()
        for name, count in zip(names, num_pages, strict=True):
            runner = FakeRunner(count, 16, vocab_size=TOKENIZER.vocab_size)
            engine = Engine(runner, None, EngineConfig())  # type: ignore[arg-type]
            engine.pins.max_pins = 3
            self.loops[name] = EngineLoop(engine)
            self.loops[name].chunk_tier = self.tier if has_tier else None
            self.loops[name].start()

    async def query(self, query: Query[Any], *, replica_id: str | None = None) -> dict[str, Any]:
        asked = [name for name in self.loops if replica_id in (None, name)]
        if self.silent & set(asked) and not isinstance(query, DeletePin):
            raise ReplicaUnavailable("a replica did not answer")
        answers = {name: await asyncio.to_thread(self.loops[name].query, query) for name in asked}
        for answer in answers.values():
            if isinstance(answer, MnemeError):
                raise answer
        return answers

    async def stats(self) -> dict[str, dict[str, Any]]:
        return {name: loop.stats() for name, loop in self.loops.items()}

    def cached(self, name: str, ids: Sequence[int], salt: str = "") -> int:
        """Tokens of a prompt that this replica need not compute; its thread ends."""
        params = SamplingParams(temperature=0, max_tokens=1, seed=0)
        request = GenerationRequest(request_id="r", prompt_token_ids=tuple(ids), sampling=params, salt=salt)
        events: list[TokenEvent] = []
        loop = self.loops[name]
        loop.stop()
        loop.engine.submit(request)
        while not any(event.usage for event in events):
            events += loop.engine.step()
        return next(event.usage.cached_tokens for event in events if event.usage)

    def save(self, ids: list[int], salt: str = "") -> None:
        """As an engine would have put it into the cache."""
        lineage = prefix_lineage(FINGERPRINT, salt)
        for part in lineage.chain(ids, CHUNK_TOKENS):
            chunk = chunk_of(ids[part.start : part.end], part.parent, FINGERPRINT, lineage)
            self.cache.put(chunk.header, chunk.layers)

    def compute(self, name: str, ids: list[int], salt: str = "", session_id: str | None = None) -> None:
        """A request on a replica; its one output token is never computed."""
        loop, has_ended = self.loops[name], threading.Event()

        def deliver(said: StepMessage) -> None:
            if any(event.finish_reason is not None for event in said.events):
                has_ended.set()

        loop.subscribe("s", deliver)
        request = GenerationRequest(
            request_id=f"{name}-{len(ids)}-{salt}-{session_id}",
            prompt_token_ids=tuple(ids),
            sampling=SamplingParams(temperature=0, max_tokens=1, seed=0),
            salt=salt,
            session_id=session_id,
            subscriber="s",
        )
        assert loop.submit_many([request]) == [None]
        assert has_ended.wait(30)
        loop.check_health()  # its figures are those of the step's end

    def close(self) -> None:
        for loop in self.loops.values():
            loop.stop()
        self.cache.close()

    def num_kept_pins(self) -> int:
        """Count both engines'; outcomes that nobody has asked for are among them, which nothing public shows."""
        return sum(len(loop.engine.pins._entries) for loop in self.loops.values())

    def kept(self) -> int:
        """Chunks in the cache."""
        chunks: int = self.cache.stats()["host"]["chunks"]
        return chunks


@contextmanager
def over(
    num_pages: tuple[int, int] = (64, 64), *, has_tier: bool = True, **config: Any
) -> Iterator[tuple[TestClient, TwoEngines]]:
    """An API over two engines."""
    engines = TwoEngines(num_pages, has_tier=has_tier)
    try:
        yield api(engines, **config), engines
    finally:
        engines.close()
