"""A blended session goes on from its stored KV in another engine, and nobody else does."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.cachetier.chunk.keys import LineageKind
from mneme.replicas.documents import BlendOptions
from mneme.replicas.engine.engine import Engine
from mneme.replicas.queries import ForkSession
from mneme.replicas.request import PromptUsage, SamplingParams
from tests.budget import examples
from tests.replicas.asked import answer
from tests.replicas.blend.test_blended_logits import SINK, prompt_of
from tests.replicas.blend.test_blended_traffic import POOL, blended
from tests.replicas.checkpoints import decoder_of, write_checkpoint
from tests.replicas.chunk_stores import FakeStore
from tests.replicas.connector.played_chunks import MovingSessions, run_played
from tests.replicas.fake_runner import continuation
from tests.replicas.schedule.test_engine_policy import make_request, run, tokens_of
from tests.replicas.tiered_engine import answers, draw, logits_of, make_cached_engine, submit, usages

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
KEY = ("tenant", "s")
PROMPT, SPANS = prompt_of([2, 0, 1])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint("llama-2", directory)
    return directory


class Talk:
    """A blended first turn, and later ones on engines that share a tier."""

    def __init__(self, directory: Path, open_store: Callable[[], Any]) -> None:
        self._decoder, self._open_store = decoder_of(directory), open_store
        self.engine = self.new_engine()

    def new_engine(self) -> Engine:
        tokenizer = SimpleNamespace(sink_ids=SINK, decode=None)
        return make_cached_engine(self._decoder, self._open_store(), tokenizer=tokenizer)

    def begin(self, **blend: Any) -> None:
        options = BlendOptions(**{"mode": "selective", "min_tokens": 1, **blend})
        parts: list[Any] = [tuple(PROMPT[: SPANS[0][0]])]
        for index, (start, end) in enumerate(SPANS):
            behind = SPANS[index + 1][0] if index + 1 < len(SPANS) else len(PROMPT)
            parts += [PROMPT[start:end], tuple(PROMPT[end:behind])]
        self.engine.submit(blended("t0.0", parts, options, 20, salt=KEY[0], session_id=KEY[1]))
        told = usages(run(self.engine))["t0.0"].blend
        assert told.declined is None

    def say(self, engine: Engine, name: str, **more: Any) -> tuple[PromptUsage, Any]:
        """Return the usage and the logits of a turn's answer."""
        options = {"append": True, "salt": KEY[0], "session_id": KEY[1], **more}
        submit(engine, name, draw(77, 12), 6, **options)
        events = run(engine)
        return usages(events)[name], logits_of(engine, name)[-len(answers(events)[name]) :]

    def moved(self) -> Engine:
        """Another engine, which knows the session's log; what was to be saved is."""
        assert self.engine.connector.saver.flush(60)
        log = self.engine.sessions.get(KEY)
        engine = self.new_engine()
        engine.sessions.restore(KEY, log.state()._replace(version=1), 2)
        return engine


@pytest.mark.parametrize("blend", [{"mode": "full_reuse"}, {"selector": "first-k"}, {"selector": "hkvd", "ratio": 0.1}])
def test_it_goes_on_where_it_moves(directory: Path, blend: dict[str, Any]) -> None:
    """Its logits are those of one that never moved, not those of the exact prompt."""
    store = FakeStore()
    talk = Talk(directory, lambda: store)
    talk.begin(**blend)
    moved = talk.moved()
    usage, logits = talk.say(moved, "t1.0")
    stayed_usage, stayed = talk.say(talk.engine, "t1.0")
    num_history = stayed_usage.prompt_tokens - 12
    assert usage.host_tokens >= num_history - 17
    assert (logits - stayed).abs().max() <= TOLERANCE
    for each in (usage, stayed_usage):
        assert each.blend.is_history_approximate
    exact = talk.moved()
    usage, _ = talk.say(exact, "t2.0", blend=BlendOptions(mode="off"))
    assert usage.blend is None
    assert usage.host_tokens <= SPANS[0][0]
    for engine in (talk.engine, moved, exact):
        engine.close()
    assert store.num_open == 0


def test_nobody_else_finds_it(directory: Path) -> None:
    """Another session or tenant of the same log, a fork, and a prompt of the same tokens compute what they see."""
    store = FakeStore()
    talk = Talk(directory, lambda: store)
    talk.begin(mode="full_reuse")
    log = talk.engine.sessions.get(KEY)
    answer(talk.engine, ForkSession(KEY, "fork"))
    chunks, fork = dict(store.chunks), talk.engine.sessions.get((KEY[0], "fork"))
    for key, state in (((KEY[0], "t"), log.state()), (("another", "s"), log.state()), ((KEY[0], "fork"), fork.state())):
        engine = talk.moved()
        engine.sessions.restore(key, state._replace(version=1), 2)
        usage, _ = talk.say(engine, "other.0", salt=key[0], session_id=key[1])
        assert usage.host_tokens <= SPANS[0][0]
        engine.close()
        assert {chunk.header.kind for chunk in store.chunks.values()} == {LineageKind.PREFIX, LineageKind.SESSION}
        store.chunks = dict(chunks)  # without what that computed exactly, which anybody may find
    engine = talk.moved()
    submit(engine, "text", list(log.ids), 1, salt=KEY[0])
    assert usages(run(engine))["text"].host_tokens <= SPANS[0][0]
    engine.close()
    talk.engine.close()


turns = st.lists(
    st.tuples(
        st.sampled_from([("", "s"), ("", "t"), ("tenant", "s")]),
        st.lists(
            st.one_of(st.integers(0, 3), st.lists(st.integers(0, 4), max_size=5).map(tuple)), min_size=1, max_size=4
        ),
        st.sampled_from(["full_reuse", "selective", "off"]),
        st.sampled_from(["first-k", "random", "query", "hkvd"]),
        st.sampled_from([0.2, 0.5]),
        st.integers(1, 20),  # of the answer
        st.booleans(),  # whether the session moves before
        st.integers(0, 2),  # losses on the device before
    ),
    min_size=2,
    max_size=8,
)


@settings(max_examples=examples(100))
@given(
    turns,
    st.sampled_from(["host", "disk"]),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.sampled_from([None, 1, 2]),
    st.integers(0, 2**16),
)
def test_any_turns_and_moves_see_their_whole_context_once(
    turns: list[Any], edge: Any, fault_share: float, step_chunks: int | None, seed: int
) -> None:
    """Whatever is lost on the way: the fake runner checks what each row sees, and that exact prompts see exact KV."""
    chance, said = random.Random(seed), defaultdict[Any, list[int]](list)
    moving = MovingSessions(chance, edge, fault_share, 96, of_cache={"step_chunks": step_chunks}, max_batch_tokens=32)
    for number, (key, parts, mode, selector, ratio, num_tokens, moves, num_losses) in enumerate(turns):
        engine, cache = moving.engine_of(key, moves=moves, version=number + 1, num_losses=num_losses)
        name, content = f"t{number}.0", [POOL[each] if isinstance(each, int) else each for each in parts] + [(1,)]
        options = BlendOptions(mode=mode, selector=selector, ratio=ratio, min_tokens=1)
        request = blended(name, content, options, num_tokens, salt=key[0], session_id=key[1], append=bool(said[key]))
        if len(said[key]) + len(request.prompt_token_ids) + num_tokens > 150:
            continue
        engine.submit(request)
        if chance.random() < 0.5:  # who must not see any of it
            engine.submit(
                make_request(
                    f"other{number}",
                    [*said[key], *request.prompt_token_ids],
                    SamplingParams(temperature=0, max_tokens=2),
                    salt=key[0],
                )
            )
        events = run_played(engine, cache, chance)
        said[key] += request.prompt_token_ids
        assert tokens_of(events, name) == continuation(said[key], num_tokens, 5)
        said[key] += tokens_of(events, name)
    moving.check_rest()
