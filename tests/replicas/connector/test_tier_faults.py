"""A copy between the tiers fails: the step is computed again, and what comes later finds nothing stale."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from mneme.cachetier.host_pages.cpu import CpuTier, DevicePool
from mneme.cachetier.host_pages.tier import KvTier, NoTier
from mneme.kernels.native.kv import gather_chunk, scatter_chunk
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.loop import EngineLoop
from mneme.replicas.model import runner as runner_module
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.request import GenerationRequest, SamplingParams, StepMessage, TokenEvent
from tests.replicas.tiered_engine import draw, full_prefill, make_engine

pytestmark = pytest.mark.engine

NUM_NEW = 4
WAIT_S = 60.0


class FailingCopies:
    """Copies that fail when they are told to, after some that do not."""

    def __init__(self) -> None:
        self.num_good: dict[str, int | None] = {"gather": None, "scatter": None}
        self.num_bad = 1  # then all is well again
        self.num_failed = 0
        self.has_failed = threading.Event()

    def copy(self, kind: str, *args: Any) -> None:
        left = self.num_good[kind]
        if left == 0 and self.num_failed < self.num_bad:
            self.num_failed += 1
            self.has_failed.set()
            raise OSError(f"{kind}: no such memory")
        self.num_good[kind] = left - 1 if left else left
        (gather_chunk if kind == "gather" else scatter_chunk)(*args)

    def tier(self, pool: DevicePool, num_pages: int, spans: None) -> KvTier:
        if num_pages == 0:
            return NoTier()
        gather, scatter = partial(self.copy, "gather"), partial(self.copy, "scatter")
        return CpuTier(pool, num_pages, gather=gather, scatter=scatter, spans=spans)


class Client:
    """Submits to a loop and waits for answers."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.loop = engine, EngineLoop(engine)
        self._messages: queue.Queue[StepMessage] = queue.Queue()
        self.loop.subscribe("", self._messages.put)
        self.loop.start()

    def ask(self, ids_by_name: dict[str, list[int]], num_new: int = NUM_NEW) -> dict[str, list[TokenEvent]]:
        """The events of these requests, each up to its end."""
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
        requests = [
            GenerationRequest(request_id=name, prompt_token_ids=tuple(ids), sampling=params, session_id=name[0])
            for name, ids in ids_by_name.items()
        ]
        assert self.loop.submit_many(requests) == [None] * len(requests)
        events: dict[str, list[TokenEvent]] = {name: [] for name in ids_by_name}
        while not all(found and found[-1].finish_reason for found in events.values()):
            for event in self._messages.get(timeout=WAIT_S).events:
                events[event.request_id].append(event)
        return events

    def check(self) -> None:
        """Nothing runs, and no page is held; on the engine's thread."""
        forest = self.engine.forest
        self.loop.between_steps(lambda engine: engine.forest.check())
        assert (forest.device.num_in_use, forest.host.num_in_use) == (0, 0)
        assert self.engine.in_flight == {}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> FailingCopies:
    copies = FailingCopies()
    monkeypatch.setattr(runner_module, "make_tier", copies.tier)
    return copies


@pytest.fixture
def client(decoder: Decoder, copies: FailingCopies) -> Iterator[Client]:
    client = Client(make_engine(decoder, num_pages=16, num_host_pages=64, copy_out_below=0))
    yield client
    client.loop.stop()


def outcome(events: list[TokenEvent]) -> tuple[list[int], str | None]:
    return [token for event in events for token in event.token_ids], events[-1].finish_reason


def history(client: Client) -> list[int]:
    """A session whose KV is on the host only, as another's prompt passed through the pool."""
    ids = draw(1, 90)
    ids += outcome(client.ask({"a1": ids})["a1"])[0]
    client.ask({"b1": draw(2, 16 * 16 - NUM_NEW)})
    assert client.engine.forest.resident("", ids).host >= 90
    return ids


@pytest.mark.parametrize("num_good", [0, 1])
def test_a_step_whose_load_fails_is_computed_again(
    decoder: Decoder, client: Client, copies: FailingCopies, num_good: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails at once, or in the middle of the forward pass."""
    ids = history(client)
    turns = {"a2": [*ids, *draw(3, 6)], "c1": draw(4, 20)}
    copies.num_good["scatter"] = num_good
    found = client.ask(turns)
    assert copies.num_failed == 1
    assert "no such memory" in caplog.text
    for name, prompt in turns.items():
        assert outcome(found[name]) == (full_prefill(decoder, prompt, NUM_NEW)[0], "length"), name
    assert found["a2"][0].usage is not None
    assert found["a2"][0].usage.cached_tokens == 0
    assert client.engine.scheduler.num_retracted >= 1
    client.check()


def test_a_save_that_fails_leaves_nothing_on_the_host(
    decoder: Decoder, client: Client, copies: FailingCopies, caplog: pytest.LogCaptureFixture
) -> None:
    """The pages that were to be saved have another owner by then: what the host was said to have is not there."""
    ids = draw(1, 90)
    ids += outcome(client.ask({"a1": ids})["a1"])[0]
    copies.num_good["gather"] = 1
    filler = draw(2, 16 * 16 - NUM_NEW)
    assert outcome(client.ask({"b1": filler})["b1"]) == (full_prefill(decoder, filler, NUM_NEW)[0], "length")
    assert copies.num_failed == 1
    client.check()
    turn = [*ids, *draw(3, 6)]
    again = client.ask({"a2": turn})["a2"]
    assert outcome(again) == (full_prefill(decoder, turn, NUM_NEW)[0], "length")
    assert again[0].usage.host_tokens == 0
    client.ask({"b3": draw(5, 16 * 16 - NUM_NEW)})
    longer = [*turn, *outcome(again)[0], 7]
    third = client.ask({"a3": longer})["a3"]  # the tier works as before
    assert outcome(third) == (full_prefill(decoder, longer, NUM_NEW)[0], "length")
    assert third[0].usage.host_tokens >= 90


def test_a_copy_ahead_of_need_that_fails_is_told_once(
    decoder: Decoder, copies: FailingCopies, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody runs then; the next step hears of it and is computed again, and what had been there is not trusted."""
    client = Client(make_engine(decoder, num_pages=16, num_host_pages=64, copy_out_below=1.0))
    copies.num_good["gather"] = 0
    ids = draw(1, 90)
    assert outcome(client.ask({"a1": ids})["a1"])[1] == "length"
    assert copies.has_failed.wait(WAIT_S)
    assert outcome(client.ask({"b1": draw(2, 20)})["b1"])[1] == "length"
    assert "no such memory" in caplog.text
    client.check()
    again = client.ask({"a2": ids})["a2"]
    assert outcome(again) == (full_prefill(decoder, ids, NUM_NEW)[0], "length")
    assert again[0].usage.cached_tokens == 0
    client.loop.stop()
