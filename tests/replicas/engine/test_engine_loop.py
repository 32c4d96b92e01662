from __future__ import annotations

import gc
import queue
import sys
import threading

import pytest

from mneme.cachetier.policy.cost_model import Calibration, CostModel
from mneme.errors import InvalidRequest, MnemeError, ReplicaUnavailable
from mneme.primitives import Workers
from mneme.replicas.blend.gate import NO_REPORT, Gate
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine import loop as loop_module
from mneme.replicas.engine.commands import ManagedChunks
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.loop import EngineLoop
from mneme.replicas.request import SamplingParams, StepMessage, TokenEvent
from tests.replicas.fake_runner import FakeRunner, continuation
from tests.replicas.schedule.test_engine_policy import make_request

LONG = SamplingParams(temperature=0, max_tokens=5_000)
WAIT_S = 30.0


@pytest.fixture
def loop():
    engine = Engine(FakeRunner(4_000, 4), None, EngineConfig())  # type: ignore[arg-type]
    loop = EngineLoop(engine)
    loop.start()
    yield loop
    loop.stop()


def subscribe(loop: EngineLoop, name: str) -> queue.Queue[StepMessage]:
    messages: queue.Queue[StepMessage] = queue.Queue()
    loop.subscribe(name, messages.put)
    return messages


def until_finished(messages: queue.Queue[StepMessage], request_id: str) -> tuple[list[int], str]:
    tokens: list[int] = []
    while True:
        for event in messages.get(timeout=WAIT_S).events:
            if event.request_id == request_id:
                tokens.extend(event.token_ids)
                if event.finish_reason is not None:
                    return tokens, event.finish_reason


def test_each_subscriber_hears_of_its_own_requests_without_gaps(loop: EngineLoop) -> None:
    streams = {name: subscribe(loop, name) for name in ("one", "two")}
    answers = loop.submit_many([make_request(name, [1, 2], subscriber=name) for name in streams])
    assert answers == [None, None]
    for name, messages in streams.items():
        received: list[StepMessage] = []
        while sum(bool(message.events) for message in received) < 4:
            received.append(messages.get(timeout=WAIT_S))  # reports are among them
        assert [message.seq for message in received] == list(range(len(received)))
        assert {message.epoch for message in received} == {loop.epoch}
        assert {event.request_id for message in received for event in message.events} == {name}
        tokens = [token for message in received for event in message.events for token in event.token_ids]
        assert tokens == continuation([1, 2], 4, 5)


def test_what_an_idle_engine_has_measured_counts_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step comes first: the measurement is told before it."""
    told: queue.Queue[bool] = queue.Queue()
    allowed = Gate({"hkvd": 0.2}, has_report=True)

    class Measurement:
        def poll(self, *, is_idle: bool) -> Gate | None:
            told.put(is_idle)
            return allowed if is_idle else None

        def close(self) -> None:
            told.put(False)

    monkeypatch.setattr(loop_module, "_IDLE_S", 0.01)
    monkeypatch.setattr(loop_module, "IDLE_REPORT_S", 0.01)
    engine = Engine(FakeRunner(4_000, 4), None, EngineConfig(), first_report=Measurement())  # type: ignore[arg-type]
    loop = EngineLoop(engine)
    assert loop.engine.gate == NO_REPORT
    loop.start()
    messages = subscribe(loop, "")
    while not told.get(timeout=WAIT_S):
        pass
    assert loop.submit_many([make_request("asked", [1, 2])]) == [None]
    assert until_finished(messages, "asked")[1] == "length"
    assert loop.engine.gate == allowed
    heard = [told.get(timeout=WAIT_S)]
    while heard[-1]:
        heard.append(told.get(timeout=WAIT_S))
    loop.stop()
    loop_stats = loop.stats()
    assert loop_stats["documents"] == "the quality report allows hkvd from 0.2"


def test_refusals_come_back_and_harm_nobody(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is out of range, of what nobody would hear, and of what the engine breaks on."""
    messages = subscribe(loop, "")
    with monkeypatch.context() as patch:
        patch.setattr(loop.engine, "submit", lambda request: 1 / 0)
        assert type(loop.submit_many([make_request("breaks", [1])])[0]) is MnemeError
    deaf = make_request("deaf", [1], subscriber="nobody")
    answers = loop.submit_many([make_request("bad", [99]), deaf, make_request("good", [1])])
    assert isinstance(answers[0], InvalidRequest)
    assert isinstance(answers[1], ReplicaUnavailable)
    assert answers[2] is None
    assert until_finished(messages, "good")[1] == "length"


def test_abort_ends_a_request_and_frees_its_pages(loop: EngineLoop) -> None:
    messages = subscribe(loop, "")
    loop.submit_many([make_request("long", [1], LONG)])
    loop.abort(["long", "unknown"])
    assert until_finished(messages, "long")[1] == "abort"
    loop.submit_many([make_request("after", [1])])
    until_finished(messages, "after")
    assert loop.engine.forest.device.num_in_use == 0


def test_what_is_handed_over_ends_once_it_is_saved(loop: EngineLoop) -> None:
    messages, waiting = subscribe(loop, ""), queue.Queue[StepMessage]()

    def flush(timeout_s: float) -> bool:
        while not messages.empty():
            waiting.put(messages.get())
        return True

    loop.chunk_tier = ManagedChunks(admin=None, fingerprint=None, flush_saves=flush)  # type: ignore[arg-type]
    loop.submit_many([make_request("long", [1], LONG)])
    assert loop.hand_over() == 1
    while not waiting.empty():
        assert all(event.finish_reason is None for event in waiting.get().events)
    assert until_finished(messages, "long")[1] == "abort"


def test_a_gone_subscriber_leaves_nothing_running(loop: EngineLoop) -> None:
    subscribe(loop, "gone")
    here = subscribe(loop, "")
    loop.submit_many([make_request("orphan", [1], LONG, subscriber="gone")])
    loop.unsubscribe("gone")
    loop.submit_many([make_request("after", [1])])
    until_finished(here, "after")
    loop.check_health()  # its figures are gathered behind what it sends
    assert loop.stats()["requests"]["running"] == 0


def test_a_failed_step_is_answered_and_the_engine_goes_on(loop: EngineLoop, caplog: pytest.LogCaptureFixture) -> None:
    messages = subscribe(loop, "")
    loop.engine.runner.fail_next = True  # type: ignore[attr-defined]
    loop.submit_many([make_request("unlucky", [1])])
    assert until_finished(messages, "unlucky") == ([], "error")
    assert "step failed" in caplog.text
    loop.submit_many([make_request("next", [1])])
    assert until_finished(messages, "next")[1] == "length"


def test_a_subscriber_that_raises_does_not_stop_the_others(loop: EngineLoop, caplog: pytest.LogCaptureFixture) -> None:
    def broken(message: StepMessage) -> None:
        raise OSError("closed")

    loop.subscribe("broken", broken)
    here = subscribe(loop, "")
    loop.submit_many([make_request("a", [1], subscriber="broken"), make_request("b", [1])])
    assert until_finished(here, "b")[1] == "length"
    assert "could not take its message" in caplog.text


def test_stop_aborts_what_runs_and_refuses_what_comes() -> None:
    engine = Engine(FakeRunner(4_000, 4), None, EngineConfig())  # type: ignore[arg-type]
    loop = EngineLoop(engine)
    messages = subscribe(loop, "")
    loop.start()
    loop.submit_many([make_request("long", [1], LONG)])
    loop.stop()
    assert until_finished(messages, "long")[1] == "abort"
    assert isinstance(loop.submit_many([make_request("late", [1])])[0], ReplicaUnavailable)
    assert not any(thread.name == "engine" for thread in threading.enumerate())
    assert not engine.runner.can_copy  # closed


def test_a_thread_that_has_ended_is_noticed_by_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(FakeRunner(4_000, 4), None, EngineConfig())  # type: ignore[arg-type]
    loop = EngineLoop(engine)
    subscribe(loop, "")
    loop.start()
    loop.check_health()
    monkeypatch.setattr(loop_module, "engine_stats", lambda _: 1 / 0)
    loop.submit_many([make_request("last", [1])])

    def ask_for_ever() -> None:
        while True:
            loop.check_health()

    with pytest.raises(ReplicaUnavailable):
        ask_for_ever()
    assert isinstance(loop.submit_many([make_request("late", [1])])[0], ReplicaUnavailable)
    loop.stop()


def test_the_thread_that_makes_an_engine_steps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a thread has of its own is then warm when requests come: see `build_engine_loop`."""
    made_by: list[int] = []
    stepped_by: list[int] = []
    step = Engine.step

    def make() -> Engine:
        made_by.append(threading.get_ident())
        return Engine(FakeRunner(64, 4), None, EngineConfig())  # type: ignore[arg-type]

    def noted(engine: Engine) -> list[TokenEvent]:
        stepped_by.append(threading.get_ident())
        return step(engine)

    monkeypatch.setattr(Engine, "step", noted)
    thread = Workers("engine", 1)
    loop = EngineLoop(thread.call(make), thread)
    messages = subscribe(loop, "")
    loop.start()
    loop.submit_many([make_request("a", [1])])
    until_finished(messages, "a")
    loop.stop()
    assert set(stepped_by) == set(made_by) != {threading.get_ident()}


def test_what_a_thread_cannot_make_is_raised_where_it_was_asked_for() -> None:
    with pytest.raises(ZeroDivisionError):
        Workers("engine", 1).call(lambda: 1 / 0)


def test_the_process_is_given_back_as_it_was_by_the_last_engine() -> None:
    before = gc.get_threshold(), sys.getswitchinterval()
    loops = [EngineLoop(Engine(FakeRunner(40, 4), None, EngineConfig())) for _ in range(2)]  # type: ignore[arg-type]
    for loop in loops:
        loop.start()
    tuned = gc.get_threshold(), sys.getswitchinterval()
    assert tuned != before
    loops[0].stop()
    assert (gc.get_threshold(), sys.getswitchinterval()) == tuned
    loops[1].stop()
    assert (gc.get_threshold(), sys.getswitchinterval()) == before
    assert gc.get_freeze_count() == 0


def test_a_thread_that_hangs_is_late_then_stalled_then_given_up(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asked before is told too; an idle thread is never late, and one that goes on is itself again."""
    monkeypatch.setattr(loop_module, "_ALIVE_CHECK_S", 0.01)
    monkeypatch.setattr(loop_module, "STALLED_S", 0.1)
    assert (loop.late_s, loop.is_stalled) == (0.0, False)
    begun, may_end = threading.Event(), threading.Event()

    def hang(_: Engine) -> None:
        begun.set()
        assert may_end.wait(WAIT_S)

    asked = Workers("asker", 1).begin(lambda: loop.between_steps(hang))
    assert begun.wait(WAIT_S)
    while loop.late_s <= 0.1:
        pass
    assert loop.is_stalled
    monkeypatch.setattr(loop_module, "HUNG_S", 0.2)
    with pytest.raises(ReplicaUnavailable, match="hangs"):
        loop.check_health()
    assert loop.hand_over() == 0
    assert isinstance(asked.exception(WAIT_S), ReplicaUnavailable)
    monkeypatch.setattr(loop_module, "HUNG_S", 60.0)
    may_end.set()
    loop.check_health()
    while loop.is_stalled:
        pass


def test_a_slow_machine_has_longer_steps(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is what its own cost model predicts of the longest."""
    begun, may_end = threading.Event(), threading.Event()
    calibration = Calibration(prefill=(0.0, 1.0, 0.0), decode=(0.0, 0.0, 0.0), step_rows=2048, kv_bytes_per_token=1)
    monkeypatch.setattr(loop_module, "STALLED_S", 0.2)

    def hang(_: Engine) -> None:
        begun.set()
        assert may_end.wait(WAIT_S)

    asking = threading.Thread(target=lambda: loop.between_steps(hang))
    asking.start()
    assert begun.wait(WAIT_S)
    while not loop.is_stalled:
        pass
    monkeypatch.setattr(loop.engine, "costs", CostModel(calibration))
    assert not loop.is_stalled
    monkeypatch.undo()
    may_end.set()
    asking.join()
