"""Steps that are launched before the tokens of the last one are known: nobody can tell but by the clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mneme import LLM
from mneme.errors import TransferFailed
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model import runner as runner_module
from mneme.replicas.model.decoder import Decoder, StepInputs
from mneme.replicas.model.draws import Sampled, SampleRow
from mneme.replicas.model.runner import Runner
from mneme.replicas.model.sampler import sample
from mneme.replicas.request import GenerationRequest, Grammar, SamplingParams, SessionKey, TokenEvent
from mneme.replicas.sequence import StepRows
from tests.replicas.chunk_stores import FakeStore
from tests.replicas.connector.played_chunks import CHUNK_TOKENS, PlayedCache, make_played_engine
from tests.replicas.fake_runner import Clock, FakeRunner, continuation
from tests.replicas.schedule.test_engine_policy import make_engine, make_request, run, tokens_of

pytestmark = pytest.mark.engine

VOCAB_SIZE = 320


def ahead_engine(num_pages: int = 64, page_size: int = 4, **options: Any) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(num_pages, page_size, runs_ahead=True)
    return make_engine(runner=runner, **options), runner


class LaggingDevice:
    """Runs what was launched when somebody waits for it, and not before: what it reads may be another's by then."""

    def __init__(self) -> None:
        self._launched: deque[Callable[[], object]] = deque()
        self.is_watched = False  # nobody may wait

    def launch(self, work: Callable[[], object]) -> None:
        self._launched.append(work)

    def drain(self) -> None:
        assert not self.is_watched, "somebody waits between two launches"
        while self._launched:
            self._launched.popleft()()


class LaggingRunner(Runner):
    """A runner on a device that lags."""

    runs_ahead = True

    def __init__(self, device: LaggingDevice, *args: Any) -> None:
        super().__init__(*args)
        self.lagging = device
        self._logits = torch.zeros(64, self.vocab_size)  # one place for all steps, as graphs have

    def forward(self, inputs: StepInputs | None) -> torch.Tensor:
        if inputs is None:
            return super().forward(None)
        logits = self._logits[: inputs.num_sampled]
        self.lagging.launch(lambda: logits.copy_(self.launch(inputs)))
        return logits

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> LaggingDraws:
        return LaggingDraws(self.lagging, logits, rows)


class LaggingDraws:
    def __init__(self, device: LaggingDevice, logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
        self.tokens = torch.full((len(rows),), -7, dtype=torch.int32)  # nobody's, until it is drawn
        self._device, self._sampled = device, list[Sampled]()

        def draw() -> None:
            drawn = sample(logits, rows)
            self.tokens.copy_(drawn.tokens)
            self._sampled = drawn.wait()

        device.launch(draw)

    def __len__(self) -> int:
        return len(self.tokens)

    def wait(self) -> list[Sampled]:
        self._device.drain()
        return self._sampled


@contextmanager
def lagging() -> Iterator[LaggingDevice]:
    """Within, what runners launch waits for this device."""
    device = LaggingDevice()

    def later(work: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: device.launch(lambda: work(*args))

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mark_free", "mark_written", "fill_in"):
            patch.setattr(runner_module, name, later(getattr(runner_module, name)))
        yield device


CONFIG = EngineConfig(page_size=16, max_batch_tokens=32, max_running=8)


def of_model(decoder: Decoder, device: LaggingDevice | None = None) -> Engine:
    runner = Runner(decoder, 64, 16) if device is None else LaggingRunner(device, decoder, 64, 16)
    return Engine(runner, None, CONFIG)


def kinds() -> dict[str, SamplingParams]:
    """Rows whose draw depends on all tokens before, each in its own way."""
    drawn: dict[str, Any] = {"temperature": 0.8, "max_tokens": 24, "ignore_eos": True}
    return {
        "greedy": SamplingParams(temperature=0, max_tokens=24),
        "top-p": SamplingParams(**drawn, top_p=0.9, seed=3),
        "penalties": SamplingParams(**drawn, repetition_penalty=1.7, frequency_penalty=0.6, seed=4),
        "presence": SamplingParams(temperature=0, presence_penalty=1.5, max_tokens=24),
        "bias": SamplingParams(**drawn, logit_bias={5: 4.0, 6: -100.0}, seed=5),
        "logprobs": SamplingParams(**drawn, logprobs=3, seed=6),
        "stop": SamplingParams(**drawn, stop_token_ids=tuple(range(0, VOCAB_SIZE, 9)), min_tokens=4, seed=7),
        "short": SamplingParams(temperature=0, max_tokens=1),
        "allowed": SamplingParams(**drawn, allowed_token_ids=tuple(range(40)), seed=8),
    }


def traffic(engine: Engine) -> dict[str, list[Any]]:
    """All kinds of rows, joining in the midst of others' answers, some behind one prompt, some longer than a step."""
    generator = np.random.default_rng(3)
    head = generator.integers(0, VOCAB_SIZE, 40).tolist()
    arrivals: dict[int, list[GenerationRequest]] = {}
    for index, (name, params) in enumerate([*kinds().items(), *kinds().items()]):
        own = generator.integers(0, VOCAB_SIZE, int(generator.integers(1, 50))).tolist()
        ids = [*head[: generator.integers(0, 40)], *own]
        arrivals.setdefault(3 * index // 2, []).append(make_request(f"{name} {index}", ids, params))
    twin = make_request("twin", list(arrivals[0][0].prompt_token_ids), kinds()["greedy"])
    arrivals[0].append(twin)
    output: dict[str, list[Any]] = {}
    for step in range(400):
        for request in arrivals.get(step, ()):
            engine.submit(request)
        if step == 12:
            engine.abort("greedy 9")
        for event in engine.step():
            assert event.error is None
            assert event.request_id in output or event.usage is not None  # with its first token
            told = output.setdefault(event.request_id, [])
            told += zip(event.token_ids, event.logprobs or [None] * len(event.token_ids), strict=True)
        engine.forest.check()
        if step > 40 and not engine.has_work:
            return output
    raise AssertionError("the requests do not end")


def ids_of(told: list[Any]) -> list[int]:
    return [token_id for token_id, _ in told]


def test_a_device_that_lags_gives_the_tokens_of_one_that_does_not(decoder: Decoder) -> None:
    with lagging() as device:
        engine = of_model(decoder, device)
        got = traffic(engine)
    assert engine.num_ahead > 0.8 * engine.num_steps
    expected = traffic(of_model(decoder))
    assert got.keys() == expected.keys()
    for name, told in expected.items():
        if name == "greedy 9":  # aborted, a token earlier or later
            continue
        assert ids_of(got[name]) == ids_of(told), name
        for (_, ours), (_, theirs) in zip(got[name], told, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
                assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_nobody_waits_before_the_next_step_is_launched(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the draws of a step on, until the forward pass of the next is launched."""
    with lagging() as device:
        engine, num_watched = of_model(decoder, device), 0
        prepare, forward = engine.runner.prepare, engine.runner.forward

        def prepared(batch: Any, moves: Any, saves: Any, expected: Any) -> Any:
            nonlocal num_watched
            device.is_watched = expected is not None
            num_watched += device.is_watched
            return prepare(batch, moves, saves, expected)

        def launched(inputs: Any) -> Any:
            try:
                return forward(inputs)
            finally:
                device.is_watched = False

        monkeypatch.setattr(engine.runner, "prepare", prepared)
        monkeypatch.setattr(engine.runner, "forward", launched)
        traffic(engine)
        assert num_watched == engine.num_ahead > 30


def test_answers_that_match_a_grammar_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = (Grammar("regex", "[0-9]{2}-(red|green)!"), Grammar("choice", ["yes", "no"]), Grammar("regex", "a+"))

    def answers(*, is_ahead: bool) -> list[tuple[str, str | None]]:
        llm = LLM("mneme-tiny", dtype="float32")
        params = [
            SamplingParams(temperature=1.0, seed=index, max_tokens=20, grammar=g) for index, g in enumerate(grammars)
        ]
        params.append(SamplingParams(temperature=1.0, seed=9, max_tokens=20, bad_words=["e", " the"], stop=["a"]))
        outputs = llm.generate(["Say something: "] * len(params), params)
        found = [(output.outputs[0].text, output.outputs[0].finish_reason) for output in outputs]
        assert (llm.engine.num_ahead > 10) is is_ahead
        llm.close()
        return found

    expected = answers(is_ahead=False)
    monkeypatch.setattr(Runner, "runs_ahead", True)
    assert answers(is_ahead=True) == expected


def test_a_known_end_costs_no_row_and_an_unknown_one_at_most_one() -> None:
    prompts = [[index % 5, 1, 2, 3, index % 3] for index in range(6)]
    by_length, by_token = SamplingParams(temperature=0, max_tokens=9), []
    for prompt in prompts:
        answer = continuation(prompt, 9, 5)
        by_token.append(SamplingParams(temperature=0, max_tokens=9, stop_token_ids=(answer[4],)))
    for params, more in (([by_length] * 6, 0), (by_token, 6)):
        num_rows = []
        for runs_ahead in (False, True):
            runner = FakeRunner(64, 4, runs_ahead=runs_ahead)
            engine = make_engine(runner=runner, prefix_sharing=False, max_batch_tokens=64)
            for index, prompt in enumerate(prompts):
                engine.submit(make_request(f"r{index}", prompt, params[index]))
            run(engine)
            num_rows.append(runner.num_rows)
        assert num_rows[0] <= num_rows[1] <= num_rows[0] + more


def test_between_two_steps_nobody_sees_a_placeholder() -> None:
    engine, _ = ahead_engine()
    key: SessionKey = ("", "s")
    params = SamplingParams(temperature=0, max_tokens=30)
    engine.submit(make_request("a", [1, 2, 3], params, session_id="s"))
    events = list[TokenEvent]()
    for _ in range(9):
        events += engine.step()
        so_far = engine.turn_so_far(key)
        assert all(token >= 0 for token in so_far[0].ids)
        assert all(
            token >= 0 for root in engine.forest.roots.values() for page in root.below_it() for token in page.tokens
        )
    engine.fork(key, ("", "t"))
    engine.abort("a")
    events += run(engine)
    got = tokens_of(events, "a")
    assert got == continuation([1, 2, 3], len(got), 5)
    engine.submit(make_request("b", [*[1, 2, 3], *got, 4], params, session_id="t"))
    assert tokens_of(run(engine), "b") == continuation([1, 2, 3, *got, 4], 30, 5)


class FailingRunner(FakeRunner):
    """Fails at some step, before or behind its launch."""

    error: Exception | None = None
    num_freed = 0

    def forward(self, batch: list[StepRows]) -> np.ndarray:
        logits = super().forward(batch)
        error, self.error = self.error, None
        if error is not None:
            raise error
        return logits

    def free_memory(self) -> None:
        self.num_freed += 1


@pytest.mark.parametrize("error", [TransferFailed("gone"), MemoryError("no device memory")])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_step_that_fails_loses_no_request(error: Exception, runs_ahead: bool) -> None:
    runner = FailingRunner(64, 4, runs_ahead=runs_ahead)
    engine = make_engine(runner=runner, max_batch_tokens=32)
    events = list[TokenEvent]()
    for index in range(3):
        engine.submit(make_request(f"r{index}", [index, 2, 3], SamplingParams(temperature=0, max_tokens=12)))
    for _ in range(5):
        events += engine.step()
    engine.submit(make_request("late", [i % 5 for i in range(50)], SamplingParams(temperature=0, max_tokens=12)))
    runner.error = error
    events += run(engine)
    for index in range(3):
        assert tokens_of(events, f"r{index}") == continuation([index, 2, 3], 12, 5)
    assert tokens_of(events, "late") == continuation([i % 5 for i in range(50)], 12, 5)
    assert {event.finish_reason for event in events} == {None, "length"}
    assert runner.num_freed == isinstance(error, MemoryError)


def test_a_model_whose_device_runs_out_of_memory_gives_the_same_tokens(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch raises is known by the runner, and nothing else is taken for it."""
    expected, engine = traffic(of_model(decoder)), of_model(decoder)
    launch, num_launched = engine.runner.launch, 0

    def fail_once(inputs: StepInputs) -> torch.Tensor:
        nonlocal num_launched
        num_launched += 1
        if num_launched == 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(inputs)

    monkeypatch.setattr(engine.runner, "launch", fail_once)
    found = traffic(engine)
    assert {name: ids_of(told) for name, told in found.items()} == {n: ids_of(told) for n, told in expected.items()}
    assert num_launched > 6
    assert not engine.runner.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))


def test_steps_are_smaller_for_a_while_where_memory_did_not_do() -> None:
    runner = FailingRunner(256, 4)
    engine = make_engine(runner=runner, num_pages=256, max_batch_tokens=64)
    engine.submit(make_request("long", [i % 5 for i in range(200)], SamplingParams(temperature=0, max_tokens=4)))
    engine.step()
    runner.error = MemoryError("no device memory")
    engine.step()
    before = runner.num_rows
    engine.step()
    assert runner.num_rows - before == 32
    assert tokens_of(run(engine), "long") == continuation([i % 5 for i in range(200)], 4, 5)


def test_a_step_costs_what_lies_between_two_ends() -> None:
    """Of steps that overlap, the time from one's tokens to the next one's, not from its launch."""
    noted, clock = list[float](), Clock()
    engine = make_engine(runner=FakeRunner(64, 4, runs_ahead=True), clock=clock, max_step_ms=0)
    engine.costs: Any = SimpleNamespace(
        learn_step=lambda _rows, seconds: noted.append(seconds), prefill_s=lambda *_: 0.0, decode_s=lambda *_: 0.0
    )
    for name in "ab":
        engine.submit(make_request(name, [1, 2, 3, ord(name) % 5], SamplingParams(temperature=0, max_tokens=8)))
    while engine.has_work:
        clock.now_s += 10.0
        engine.step()
    assert set(noted[1:-1]) == {10.0}


def test_chunks_of_a_step_under_way_are_kept_if_its_request_ends_and_not_if_its_session_is_deleted() -> None:
    """The step that completes a chunk is not committed yet when somebody says so."""
    prompt = [i % 5 for i in range(2 * CHUNK_TOKENS - 3)]
    num_chunks = []
    for end in (lambda engine: engine.abort("a"), lambda engine: engine.sessions.delete(("", "s"))):
        store = FakeStore()
        cache = PlayedCache(store, 4)
        engine = make_played_engine(FakeRunner(64, 4, runs_ahead=True), cache, Clock(), max_batch_tokens=64)
        params = SamplingParams(temperature=0, max_tokens=20)
        engine.submit(make_request("a", prompt, params, session_id="s"))
        cache.play()
        while sum(map(len, [s.context for s in engine.scheduler.running])) < 2 * CHUNK_TOKENS:
            engine.step()
        before = cache.cache.saver.counts.chunks
        assert before == 1  # the second is complete with the row that is under way
        end(engine)
        run(engine)
        num_chunks.append(cache.cache.saver.counts.chunks - before)
        engine.close()
    assert num_chunks[0] >= 1
    assert num_chunks[1] == 0


def test_pages_of_chunks_under_way_get_new_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step waits for their copies; these go on by themselves, whoever commits the step that wrote them."""
    monkeypatch.setattr(Runner, "runs_ahead", True)
    config = {"num_pages": 40, "page_size": 16, "host_cache_bytes": 0, "max_context": 2048}
    cache = {"disk": {"folder": str(tmp_path), "capacity_bytes": 1 << 28}}
    generator = np.random.default_rng(1)
    llm = LLM("mneme-tiny", dtype="float32", config=config, cache=cache)
    engine, connector = llm.engine, llm.engine.connector
    begin, num_begun = connector.saver.begin, 0

    def begun(jobs: Any) -> None:
        nonlocal num_begun
        num_begun += len(jobs)
        begin(jobs)

    monkeypatch.setattr(connector.saver, "begin", begun)
    for name in "ab":  # one fills nearly all pages, the other needs them
        ids = generator.integers(0, 256, 600).tolist()
        engine.submit(make_request(name, ids, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)))
    while not num_begun:
        engine.step()
    engine.abort("a")
    events = list[TokenEvent]()
    while engine.has_work:
        events += engine.step()
    assert len(tokens_of(events, "b")) == 8
    llm.close()


def test_a_warm_up_that_does_not_fit_is_said() -> None:
    """Whoever measures steps is not told of one that was computed again in smaller parts."""
    runner = FailingRunner(64, 4)
    engine = Engine(runner, None, EngineConfig(max_batch_tokens=32, max_running=8), recovers=False)  # type: ignore[arg-type]
    engine.submit(make_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=4)))
    runner.error = MemoryError("no device memory")
    with pytest.raises(MemoryError):
        engine.step()


def test_many_steps_without_memory_end_no_answer_that_goes_on() -> None:
    runner = FailingRunner(256, 4)
    engine = make_engine(runner=runner, num_pages=256, max_batch_tokens=32)
    for index in range(8):
        engine.submit(make_request(f"r{index}", [index % 5, 2, 3], SamplingParams(temperature=0, max_tokens=40)))
    events = list[TokenEvent]()
    for _ in range(5):  # more than a request may lose between two tokens
        before = engine.in_flight
        while any(engine.in_flight[name] <= count for name, count in before.items()):
            events += engine.step()
        runner.error = MemoryError("no device memory")
    engine.submit(make_request("late", [i % 5 for i in range(50)], SamplingParams(temperature=0, max_tokens=2)))
    events += run(engine)
    assert {event.finish_reason for event in events} == {None, "length"}
    assert tokens_of(events, "late") == continuation([i % 5 for i in range(50)], 2, 5)
