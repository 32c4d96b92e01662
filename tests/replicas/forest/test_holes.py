"""Sessions that lost KV, anywhere and in any mix of tiers, go on as after a full prefill; only the holes are computed.

float32, |difference| of logits <= 1e-4 against an engine that has seen nothing before (Pensieve 4.3, Fig. 6).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mneme.replicas.engine.engine import Engine
from mneme.replicas.forest.tree import DEVICE
from mneme.replicas.model.decoder import Decoder
from tests.budget import examples
from tests.replicas.tiered_engine import (
    Place,
    answers,
    draw,
    dropped_everywhere,
    full_prefill,
    load_decoder,
    logits_of,
    lose_range,
    make_engine,
    places,
    run,
    runner_of,
    submit,
    tier_of,
    usages,
)

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
NUM_OUT = 3
MODELS = ["llama-3", "mistral", "qwen2-window"]  # no window; 40 tokens on all layers; 40 on some


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder("mistral", tmp_path_factory.mktemp("mistral"))


losses = st.lists(
    st.tuples(
        st.integers(0, 3),  # session
        st.integers(0, 150),  # from this position on
        st.integers(1, 60),  # so many tokens
        st.sampled_from(["host", "dropped", "stale"]),
    ),
    max_size=8,
)
rounds = st.lists(
    st.tuples(losses, st.lists(st.integers(1, 24), min_size=1, max_size=4)),  # new tokens of each session's turn
    min_size=1,
    max_size=3,
)


class Conversations:
    """Sessions that share a head, on one engine."""

    def __init__(self, engine: Engine, num_head: int, lengths: list[int]) -> None:
        self.engine = engine
        head = draw(1, num_head)
        # Tokens under 32 are unique to a session: what is new is never shared, what is old to the token.
        self.ids = [[*head, index, *draw(10 + index, length)] for index, length in enumerate(lengths)]
        self._num_turns = 0
        for index, ids in enumerate(self.ids):
            submit(engine, f"{index}-0.0", ids, NUM_OUT, session_id=f"s{index}")
        for name, tokens in answers(run(engine)).items():
            self.ids[int(name[0])] += tokens

    def turn(self, decoder: Decoder, num_new_by_session: list[int]) -> None:
        """The next turns of some sessions in one batch; each is checked against a full prefill."""
        self._num_turns += 1
        asked: dict[str, list[int]] = {}
        for index, num_new in enumerate(num_new_by_session[: len(self.ids)]):
            self.ids[index] += [16 + index, *draw(100 * self._num_turns + index, num_new - 1)]
            asked[f"{index}-{self._num_turns}.0"] = list(self.ids[index])
        known = {name: places(self.engine, ids) for name, ids in asked.items()}
        tiers = {place: tier_of(place) for found in known.values() for place in found}
        kept = self._pages([place for place, tier in tiers.items() if tier == "device"])
        rows_before = runner_of(self.engine).num_rows
        for name, ids in asked.items():
            submit(self.engine, name, ids, NUM_OUT, session_id=f"s{name[0]}")
        events = run(self.engine)
        num_rows = runner_of(self.engine).num_rows - rows_before
        self._check_rows(asked, known, tiers, usages(events), num_rows)
        assert self._pages(list(kept)) == kept, "KV that was there is not where it was"
        for name, tokens in answers(events).items():
            expected, logits = full_prefill(decoder, asked[name], NUM_OUT)
            assert (logits_of(self.engine, name) - logits).abs().max() <= TOLERANCE, name
            assert tokens == expected
            self.ids[int(name[0])] += tokens

    def lose(self, index: int, start: int, count: int, how: str) -> None:
        ids = self.ids[index % len(self.ids)]
        lose_range(self.engine, ids, start % len(ids), start % len(ids) + count, how)

    def _check_rows(
        self,
        asked: dict[str, list[int]],
        known: dict[str, list[Place]],
        tiers: dict[Place, str],
        usage_by_name: dict[str, Any],
        num_rows: int,
    ) -> None:
        """Each new token is computed once, each hole once for all, and nothing else."""
        num_by_tier = Counter(tiers.values())
        new = {tuple(ids[: i + 1]) for name, ids in asked.items() for i in range(len(known[name]), len(ids))}
        found = {name: usage.kv_details() for name, usage in usage_by_name.items()}
        for name, details in found.items():
            assert sum(details.values()) == len(asked[name])
        total = {key: sum(details[key] for details in found.values()) for key in ("recomputed", "dropped", "host")}
        assert total["recomputed"] == len(new)
        assert num_rows == len(new) + total["dropped"] + (NUM_OUT - 1) * len(asked)
        if self.engine.forest.window is None:
            assert total["dropped"] == num_by_tier["dropped"]
        assert total["dropped"] <= num_by_tier["dropped"]
        # What one session loads, another may use more of; under a window what no row sees stays where it is.
        is_exact = len(asked) == 1 and self.engine.forest.window is None
        assert total["host"] == num_by_tier["host"] if is_exact else total["host"] <= num_by_tier["host"]

    def _pages(self, found: list[Place]) -> dict[Place, int | None]:
        return {(page, offset): page.ids[DEVICE] for page, offset in found if offset < page.filled[DEVICE]}


@pytest.mark.at_length
@settings(
    max_examples=examples(20, at_length=80),
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.integers(0, 50), st.lists(st.integers(1, 110), min_size=1, max_size=4), rounds, st.sampled_from([16, 48, 2048])
)
def test_any_holes_give_the_logits_of_a_full_prefill(
    model: Decoder, num_head: int, lengths: list[int], script: list[Any], max_batch_tokens: int
) -> None:
    engine = make_engine(model, max_batch_tokens=max_batch_tokens, max_running=8, copy_out_below=0)
    conversations = Conversations(engine, num_head, lengths)
    for lost, num_new_by_session in script:
        for index, start, count, how in lost:
            conversations.lose(index, start, count, how)
        conversations.turn(model, num_new_by_session)
    runner_of(engine).close()


def session_of(decoder: Decoder, num_tokens: int, num_sessions: int = 1) -> Conversations:
    """Sessions of which so many tokens are shared; each has gone on for one turn."""
    engine = make_engine(decoder, copy_out_below=0)
    return Conversations(engine, num_tokens, [20] * num_sessions)


def test_an_answer_that_is_drawn_again_follows_what_the_host_has(decoder: Decoder) -> None:
    """Pages come back in decode, into a plan that is kept."""
    talk = session_of(decoder, 60)
    prompt = list(talk.ids[0])
    submit(talk.engine, "first", prompt, 40)
    first = answers(run(talk.engine))["first"]
    lose_range(talk.engine, prompt + first, len(prompt) + 2, len(prompt) + 20, "host")
    lose_range(talk.engine, prompt + first, len(prompt) + 20, len(prompt) + 40, "dropped")
    loaded_before = runner_of(talk.engine).num_loaded
    submit(talk.engine, "again", prompt, 40)
    assert answers(run(talk.engine))["again"] == first
    assert runner_of(talk.engine).num_loaded > loaded_before
    assert (logits_of(talk.engine, "again") - logits_of(talk.engine, "first")).abs().max() <= TOLERANCE


def test_holes_that_no_row_sees_stay(mistral: Decoder) -> None:
    talk = session_of(mistral, 160)
    for start, end in ((0, 16), (32, 48), (144, 160)):  # rows from 144 on see 105 and what follows
        lose_range(talk.engine, talk.ids[0], start, end, "dropped")
    rows_before = runner_of(talk.engine).num_rows
    talk.turn(mistral, [6])
    assert runner_of(talk.engine).num_rows - rows_before == 16 + 6 + 1 + NUM_OUT - 1
    assert dropped_everywhere(talk.engine, talk.ids[0]) == [*range(16), *range(32, 48)]


def test_a_hole_under_a_window_takes_what_its_own_rows_see(mistral: Decoder) -> None:
    talk = session_of(mistral, 208)
    for start, end in ((0, 16), (64, 80), (112, 128), (144, 160), (192, 208)):
        lose_range(talk.engine, talk.ids[0], start, end, "dropped")
    # 192 sees 153, so that 144 is computed, which sees 105; 112 sees 73; 64 sees 25.
    talk.turn(mistral, [6])
    assert dropped_everywhere(talk.engine, talk.ids[0]) == list(range(16))
