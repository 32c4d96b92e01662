"""A truncated session goes on from its stored KV in another engine, and nobody else does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.chunk.keys import LineageKind, session_lineage
from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.cachetier.names import Miss
from mneme.cachetier.node.sources import ProcessChunkStore
from mneme.replicas.engine.commands import ManagedChunks, chunk_tier_of
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.queries import DeleteKv, GetSession, GetTokens, LookUpPages
from mneme.replicas.request import PromptUsage, SamplingParams, SessionKey, TokenEvent
from mneme.replicas.truncation import Truncation
from tests.budget import examples
from tests.cachetier.chunks import chunk_files
from tests.replicas.asked import answer
from tests.replicas.cache_faults.saved_turn import header_of
from tests.replicas.checkpoints import decoder_of, write_checkpoint
from tests.replicas.chunk_stores import CHUNK_TOKENS, FakeStore
from tests.replicas.connector.played_chunks import MovingSessions, run_played
from tests.replicas.fake_runner import FakeRunner
from tests.replicas.model.dense_session import DenseSession
from tests.replicas.schedule.test_engine_policy import make_engine, make_request, tokens_of
from tests.replicas.tiered_engine import (
    answers,
    draw,
    fingerprint_of,
    logits_of,
    make_cached_engine,
    run,
    submit,
    usages,
)

pytestmark = pytest.mark.engine

WINDOW = 300
TOLERANCE = 1e-4
KEY = ("tenant", "s")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Any]:
    directory = tmp_path_factory.mktemp("model")
    model = write_checkpoint("llama-2", directory)
    return decoder_of(directory, max_context=WINDOW), model


class Conversation:
    """One session, which moves from engine to engine, beside the dense computation of the same."""

    def __init__(
        self, checkpoint: tuple[Decoder, Any], truncation: Truncation, open_store: Callable[[], Any] | None = None
    ) -> None:
        self.decoder, self.model = checkpoint
        self.store, self.truncation = FakeStore(), truncation
        self._open_store = open_store or (lambda: self.store)
        self.dense = DenseSession(self.model, WINDOW, truncation)
        self.engine = self.new_engine()
        self._numbers = itertools.count()

    def new_engine(self) -> Engine:
        return make_cached_engine(self.decoder, self._open_store(), num_pages=64, max_context=WINDOW)

    def say(self, num_new: int, num_tokens: int, key: SessionKey = KEY, **more: Any) -> PromptUsage:
        """A turn; its answer is drawn from the logits of the dense computation."""
        number = next(self._numbers)
        ids, name = draw(number, num_new), f"t{number}.0"
        options = {"truncation": self.truncation, "append": number > 0, "salt": key[0], "session_id": key[1], **more}
        submit(self.engine, name, ids, num_tokens, **options)
        events = run(self.engine)
        output = answers(events)[name]
        logits = logits_of(self.engine, name)[-len(output) :]  # without those of a step that was taken back
        assert (logits - self.dense.replay(ids, output)).abs().max() <= TOLERANCE
        return usages(events)[name]

    def move(self, key: SessionKey = KEY, **more: Any) -> None:
        """To a new engine, which knows the session's log."""
        log = self.engine.sessions.get(KEY)
        state = log.state()
        self.close()
        self.engine = self.new_engine()
        self.engine.sessions.restore(key, state._replace(version=1, **more), 2)

    def forget(self, start: int = 0) -> None:
        """What it sees is computed anew from this token on; exactly, if that is the first."""
        self.dense.forget(start)

    def close(self) -> None:
        assert self.engine.connector.saver.flush(60)
        self.engine.close()
        assert self.store.num_open == 0

    def chunk_keys(self) -> list[bytes]:
        """The session's own chunks of the last event, in order."""
        log = self.engine.sessions.get(KEY)
        lineage = session_lineage(fingerprint_of(self.decoder), *KEY, log.seen.event)
        return [each.key for each in lineage.chain(log.seen.ids, CHUNK_TOKENS) if each.key in self.store.chunks]


@pytest.mark.parametrize(
    ("truncation", "edge"),
    [(Truncation(keep_first=0), "host"), (Truncation(), "disk"), (Truncation(ratio=0.4, keep_first=5), "host")],
)
def test_it_goes_on_where_it_moves(checkpoint: tuple[Decoder, Any], truncation: Truncation, edge: Any) -> None:
    """Over several truncations and moves its logits are those of one that never moved."""
    talk = Conversation(checkpoint, truncation)
    talk.store.edge = edge
    talk.say(100, 240)
    for num_new, num_tokens in ((20, 30), (9, 120), (30, 10)):
        talk.move()
        usage = talk.say(num_new, num_tokens)
        num_history = usage.prompt_tokens - num_new
        assert usage.host_tokens + usage.disk_tokens >= num_history - 17  # all but a tail that is not worth a question
    assert talk.dense.num_truncations >= 2
    talk.close()


def test_who_looks_a_session_up_finds_what_its_next_turn_would(checkpoint: tuple[Decoder, Any]) -> None:
    """As lookups and pins of the HTTP API do: its pages, and its chunks, which are its own since it was truncated."""
    talk = Conversation(checkpoint, Truncation())
    talk.say(100, 240)
    known = answer(talk.engine, GetTokens(KEY, visible=True))
    found = answer(talk.engine, LookUpPages(KEY[0], known.ids, KEY))
    shown = answer(talk.engine, GetSession(KEY))["kv"]
    assert (found["device"], found["host"]) == (shown["device"], shown["host"])
    assert found["device"] > 100 > answer(talk.engine, LookUpPages(KEY[0], known.ids))["device"]
    assert talk.engine.connector.saver.flush(60)
    nobody: Any = None
    tier = ManagedChunks(admin=nobody, fingerprint=fingerprint_of(talk.decoder))
    chain = tier.chain(KEY[0], known.ids, KEY, known.event)
    assert [key for key in chain.keys if key in talk.store.chunks] == talk.chunk_keys() != []
    assert not set(tier.chain(KEY[0], known.ids).keys) & talk.store.chunks.keys()
    talk.close()


OTHERS = {"session": (("tenant", "t"), {}), "tenant": (("another", "s"), {}), "event": (KEY, {"event": bytes(16)})}


@pytest.mark.parametrize(("key", "more"), OTHERS.values(), ids=OTHERS)
def test_nobody_else_finds_it(checkpoint: tuple[Decoder, Any], key: SessionKey, more: dict[str, Any]) -> None:
    talk = Conversation(checkpoint, Truncation(keep_first=0))
    talk.say(100, 240)
    talk.move(key, **more)
    talk.forget()
    assert talk.say(20, 10, key).cached_tokens == 0
    submit(talk.engine, "text", talk.dense.visible()[:-5], 1, salt=KEY[0])
    assert usages(run(talk.engine))["text"].host_tokens == 0
    talk.close()


def test_a_layer_that_does_not_come_lets_all_be_computed_anew(checkpoint: tuple[Decoder, Any]) -> None:
    """That is exact then, and found where the session moves next."""
    talk = Conversation(checkpoint, Truncation())
    talk.say(100, 240)
    lost = talk.chunk_keys()[1]

    def fault(header: ChunkHeader, layer: int) -> Miss | None:
        return Miss.BAD_CHECKSUM if (header.key, layer) == (lost, 1) else None

    talk.store.fault = fault
    talk.move()
    talk.forget()
    assert talk.say(20, 10).host_tokens == 0
    talk.move()
    assert talk.say(9, 4).host_tokens > 200
    talk.close()


def test_behind_a_chunk_that_is_gone_it_is_another_event(checkpoint: tuple[Decoder, Any]) -> None:
    """What was computed behind that chunk before is not what is computed there now, and is not found any more."""
    talk = Conversation(checkpoint, Truncation())
    talk.say(100, 240)
    keys = talk.chunk_keys()
    gone = talk.store.chunks.pop(keys[1])
    talk.move()
    talk.forget(CHUNK_TOKENS)
    assert talk.say(20, 10).host_tokens == CHUNK_TOKENS
    talk.store.chunks[keys[1]] = gone
    assert not {*talk.chunk_keys()} & {*keys}
    talk.move()
    assert talk.say(9, 4).host_tokens > 200
    talk.close()


def test_it_outlives_a_restart_until_it_is_deleted(checkpoint: tuple[Decoder, Any], tmp_path: Path) -> None:
    """What is exact stays then: others may begin so."""
    disk = DiskTierConfig(folder=str(tmp_path), capacity_bytes=1 << 24)
    config = CacheConfig(chunk_tokens=CHUNK_TOKENS, disk=disk, host_bytes=1 << 24)
    talk = Conversation(checkpoint, Truncation(), lambda: ProcessChunkStore(config))
    talk.say(100, 240)
    talk.move()
    assert talk.say(20, 10).disk_tokens > 180
    talk.move()
    tier = chunk_tier_of(talk.engine.connector)
    assert answer(talk.engine, DeleteKv("tenant", (), ("tenant", "t")), tier)["chunks"] == 0
    assert answer(talk.engine, DeleteKv("tenant", (), KEY), tier)["chunks"] > 0
    assert {header_of(path).kind for path in chunk_files(tmp_path)} == {LineageKind.PREFIX}
    talk.forget()
    assert talk.say(20, 10).cached_tokens == 0
    talk.close()


turns = st.lists(
    st.tuples(
        st.sampled_from([("", "s"), ("", "t"), ("tenant", "s")]),
        st.integers(1, 20),  # new tokens
        st.integers(1, 40),  # of the answer
        st.booleans(),  # whether the session moves before
        st.integers(0, 2),  # losses on the device before
    ),
    min_size=2,
    max_size=10,
)


@pytest.mark.at_length
@settings(max_examples=examples(20, at_length=100))
@given(
    turns,
    st.sampled_from([Truncation(), Truncation(keep_first=0), Truncation(ratio=0.3)]),
    st.sampled_from(["host", "disk"]),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.sampled_from([None, 1, 2]),
    st.integers(0, 2**16),
)
def test_any_turns_and_moves_give_the_tokens_of_a_session_that_never_moved(
    turns: list[Any], truncation: Truncation, edge: Any, fault_share: float, step_chunks: int | None, seed: int
) -> None:
    """Whatever is lost on the way: the fake runner checks where each row sees each token."""
    chance = random.Random(seed)
    of_cache = {"step_chunks": step_chunks, "read_buffer_bytes": chance.choice([300, 1 << 20])}  # of one chunk, of all
    moving = MovingSessions(chance, edge, fault_share, 64, of_cache=of_cache, max_context=48)
    plain = make_engine(runner=FakeRunner(64, 4, max_context=48))
    for number, (key, num_new, num_tokens, moves, num_losses) in enumerate(turns):
        engine, cache = moving.engine_of(key, moves=moves, version=number + 1, num_losses=num_losses)
        ids = [chance.randrange(5) for _ in range(num_new)]
        said, append = [], plain.sessions.get(key) is not None
        for each in (plain, engine):
            params = SamplingParams(temperature=0, max_tokens=num_tokens)
            events: list[TokenEvent] = []
            more = {"salt": key[0], "session_id": key[1], "append": append, "truncation": truncation}
            if each is engine and chance.random() < 0.5:  # beside which a history may come in parts
                stream = make_request(f"stream{number}", [number % 5], SamplingParams(temperature=0, max_tokens=30))
                each.submit(stream)
                events += each.step() + each.step()
            each.submit(make_request(f"t{number}.0", ids, params, **more))
            events += run_played(each, cache, chance)
            said.append(tokens_of(events, f"t{number}.0"))
        assert said[0] == said[1]
        assert len(said[0]) == num_tokens
    moving.check_rest()
