"""What an engine keeps of conversations that nobody uses now."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from typing import Any

import pytest

from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.output import MAX_EXPLANATIONS
from mneme.replicas.request import SamplingParams
from mneme.replicas.sessions.token_log import MAX_MARKS
from tests.replicas.schedule.test_engine_policy import make_engine, make_request
from tests.replicas.sessions.test_session_machine import LETTERS, LetterTokenizer

NUM_SESSIONS, NUM_TURNS = 60, 1 + MAX_MARKS // 2
PAGE_SIZE, PAGES_EACH = 16, 2
SALT = "t" * 32
# Files of which there are objects per page.
PER_PAGE = ("replicas/forest/*", "cachetier/policy/eviction", "replicas/fake_runner")


def session_id(index: int) -> str:
    return f"{index:032x}:{index:032x}"


def converse(engine: Engine, first: int, count: int) -> None:
    """Conversations that send their whole history, so that each log has as many marks as it may."""
    words = itertools.islice(itertools.product(LETTERS, repeat=6), first, first + count)
    texts = {session_id(first + i): "".join(word) for i, word in enumerate(words)}
    params = SamplingParams(temperature=0, max_tokens=2)
    for number in range(NUM_TURNS):
        for name, text in texts.items():
            session: dict[str, Any] = {"salt": SALT, "session_id": name, "session_ttl_s": 1e8}
            ids = [LETTERS.index(letter) for letter in text]
            engine.submit(make_request(f"{name}-{number:x}.0", ids, params, prompt_text=text, **session))
        while engine.has_work:
            for event in engine.step():
                name = event.request_id.partition("-")[0]
                texts[name] += "".join(LETTERS[i] for i in event.token_ids)
        texts = {name: text + "b" for name, text in texts.items()}


def traced_bytes() -> int:
    """What is allocated, but for what there is once per page: nodes, candidates for eviction, the runner's slots."""
    gc.collect()
    per_page = [tracemalloc.Filter(False, f"*/{name}.py", all_frames=True) for name in PER_PAGE]
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(per_page).traces)


@pytest.mark.slow
@pytest.mark.parametrize("num_pages", [64, PAGES_EACH * NUM_SESSIONS + 64], ids=["KV gone", "KV cached"])
def test_an_idle_session_costs_an_engine_at_most_1_kb_and_4_bytes_a_token(num_pages: int) -> None:
    """All of it but the pages: token log, places in tables, claim on a path, a time of its own; long names."""
    tracemalloc.start(2)  # a heap's entries belong to the file that pushed them
    engine = make_engine(
        num_pages, PAGE_SIZE, tokenizer=LetterTokenizer(), session_ttl_s=1e9, max_running=32, max_batch_tokens=256
    )
    converse(engine, 0, MAX_EXPLANATIONS // NUM_TURNS + 1)  # until what is bounded has reached its bound
    num_before, num_tokens_before, bytes_before = len(engine.sessions), engine.sessions.num_tokens, traced_bytes()
    converse(engine, num_before, NUM_SESSIONS)
    used = traced_bytes() - bytes_before
    tracemalloc.stop()
    num_tokens = engine.sessions.num_tokens - num_tokens_before
    assert len(engine.sessions) == num_before + NUM_SESSIONS
    log = engine.sessions.get((SALT, session_id(num_before)))
    assert (engine.forest.resident(SALT, log.ids.tolist()).device > PAGE_SIZE) == (num_pages > 64)
    session_bytes = (used - 4 * num_tokens) / NUM_SESSIONS
    assert 256 < session_bytes <= 1024
