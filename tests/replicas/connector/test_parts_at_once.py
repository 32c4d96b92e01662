"""Two parts: the first was read, and then a step loads all, as the streams have ended."""

from __future__ import annotations

from tests.replicas.chunk_stores import FakeStore
from tests.replicas.connector.test_played_loads import IDS, Played, run_some, store
from tests.replicas.fake_runner import continuation
from tests.replicas.schedule.test_engine_policy import run, tokens_of

__all__ = ["store"]


def test_a_stream_ends_between_two_parts_of_a_load(store: FakeStore) -> None:
    store.edge = "disk"
    case = Played(store, step_chunks=1, read_buffer_bytes=1)
    case.submit("other", [4] * 10, 20)
    case.cache.play()
    run_some(case.engine, 2)
    case.submit("a", IDS[:30])
    case.cache.play()
    case.engine.abort("other")
    events = run(case.engine)
    assert tokens_of(events, "a") == continuation(IDS[:30], 3, 5)
    usage = next(event.usage for event in events if event.request_id == "a" and event.usage is not None)
    assert (usage.disk_tokens, case.engine.scheduler.num_retracted) == (24, 0)
    case.check_rest()
