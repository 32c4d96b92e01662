"""`EngineClient` over many replicas: choose, submit, stream, and go on elsewhere when a replica is lost.

A generation that loses its replica is submitted again with `prompt + emitted tokens` as its prompt,
`max_tokens` and `min_tokens` reduced by what was emitted, and `output_offset` saying how much of the prompt
is output; each attempt has a request id of its own. Preserved: the tokens already sent; greedy output, token
by token (in bfloat16 up to the rounding of another batch shape); seeded draws, penalties and stop strings, which
count the output from its beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, TypeVar

from mneme.cluster.config import FLUSH_S
from mneme.cluster.serve.calls import ReplicaCalls
from mneme.cluster.serve.engine_client import STALLED, Condition, newest
from mneme.cluster.serve.link import LinkLost, ReplicaLink, Sink
from mneme.cluster.wire.answers import ExplainedRoute
from mneme.errors import DeadlineExceeded, InvalidRequest, MnemeError, Overloaded, ReplicaUnavailable
from mneme.primitives import Bounded
from mneme.replicas.queries import DeleteSession, FlushSaves, ForkSession, GetReport, GetSession, LeaveSession, Query
from mneme.replicas.report import ReplicaReport
from mneme.replicas.request import GenerationRequest, PromptUsage, SessionKey, TokenEvent, is_of_request
from mneme.router.chooser import ReplicaChooser, Reservation, Route
from mneme.router.hot_prefixes import HotPrefixes
from mneme.router.score import RouterConfig

R = TypeVar("R")

logger = logging.getLogger(__name__)

WAIT_FOR_REPLICA_S = 30.0  # how long a request waits for a replica that is on its way, and one that has begun for any
COLD_START_S = 300.0  # where replicas are started by requests: that one loads its model, compiles and captures
NO_REPLICA_S = 0.5  # for none to come back where all are lost; who asks then is told to come again
MAX_LOSSES = 5  # replicas a generation may lose before it gives up
QUERY_TIMEOUT_S = 15.0  # an engine answers between two steps, which may take seconds; logs may be slow too
MAX_ROUTES = 1_024  # choices of replicas that can be explained, and those of what runs
NUM_HOT = 8  # shared beginnings of prompts that a new replica has before it gets requests
MAX_HOMES = 50_000  # sessions whose last replica an ingress remembers
_PAUSE_S = 0.1  # before a replica that could not do something yet is asked again
_OF_SESSIONS = (GetSession, DeleteSession, ForkSession)
STATS_TIMEOUT_S, FIRST_STATS_S = 0.5, 5.0  # of a replica whose figures are known, and of one that has said none yet
_STOP_POLL_S = 0.05
STATS_MAX_AGE_S = 0.5  # with the timeout: what `stats` returns is at most 1 s old


@dataclass(slots=True)
class PlacedChoice:
    """One request of a generation, and what the client already has of it."""

    request: GenerationRequest
    attempt: int = 0
    emitted: list[int] = field(default_factory=list)
    usage: PromptUsage | None = None
    is_finished: bool = False
    clock: Callable[[], float] = time.monotonic
    _deadline_s: float = inf  # of this process's clock: others differ

    def __post_init__(self) -> None:
        if self.request.timeout_s is not None:
            self._deadline_s = self.clock() + self.request.timeout_s

    @property
    def time_left_s(self) -> float:
        return self._deadline_s - self.clock()

    @property
    def attempt_id(self) -> str:
        """The request id at the replica; a turn's choices keep their common stem and their suffix."""
        request_id = self.request.request_id
        if not self.attempt:
            return request_id
        suffix = f".{self.request.choice_index}"
        stem = request_id.removesuffix(suffix)
        return f"{stem}~{self.attempt}{suffix if stem != request_id else ''}"

    def add_event(self, event: TokenEvent) -> TokenEvent:
        """Note an event; what goes on to the client has the usage once, as of the first submit."""
        self.emitted.extend(event.token_ids)
        self.is_finished = event.finish_reason is not None
        usage = event.usage if self.usage is None else None
        self.usage = self.usage or event.usage
        if usage is not None and usage.blend is not None:  # it stays in the order in which it began
            self.request = self.request.in_order(usage.blend.order)
        return event._replace(request_id=self.request.request_id, usage=usage)

    def remaining(self) -> GenerationRequest:
        """Make a request of what is still to be generated; raises `DeadlineExceeded`."""
        time_left_s = self.time_left_s
        if time_left_s <= 0:
            raise DeadlineExceeded
        sampling, num_emitted = self.request.sampling, len(self.emitted)
        if num_emitted:
            left = None if sampling.max_tokens is None else sampling.max_tokens - num_emitted
            min_tokens = max(sampling.min_tokens - num_emitted, 0)
            sampling = replace(sampling, max_tokens=left, min_tokens=min_tokens, prompt_logprobs=None)  # they were told
        return replace(
            self.request,
            request_id=self.attempt_id,
            prompt_token_ids=(*self.request.prompt_token_ids, *self.emitted),
            timeout_s=None if time_left_s == inf else time_left_s,
            output_offset=num_emitted,
            num_prompt=self.usage.prompt_tokens if self.usage and not self.usage.truncated_tokens else None,
            sampling=sampling,
        )

    def is_complete(self) -> bool:
        """Return whether all tokens came and only the word that it has finished was lost."""
        max_tokens = self.request.sampling.max_tokens
        return max_tokens is not None and len(self.emitted) >= max_tokens


@dataclass(slots=True, eq=False)
class Placement:
    """Choices running on one replica."""

    link: ReplicaLink
    reservation: Reservation
    sink: Sink
    choices: dict[str, PlacedChoice]

    async def events(self) -> AsyncGenerator[TokenEvent, None]:
        """Events until each choice has finished; raises `LinkLost`."""
        while not all(choice.is_finished for choice in self.choices.values()):
            item = await self.sink.get()
            if isinstance(item, LinkLost):
                raise item
            if item.finish_reason == "abort":  # not by us, who would not listen any more: the replica is stopping
                raise LinkLost("the replica ended the request")
            usage = item.usage
            if usage is None:
                self.reservation.started()
            else:
                is_blended = usage.blend is not None and usage.blend.declined is None
                self.reservation.started(usage.cached_tokens, is_private=is_blended or usage.truncated_tokens > 0)
            yield self.choices[item.request_id].add_event(item)

    def end(self) -> None:
        """Give the reservation back and abort what still runs; never awaits."""
        self.reservation.release()
        self.link.abort([request_id for request_id, c in self.choices.items() if not c.is_finished])


class RayEngineClient:
    """Implements `EngineClient` on one event loop, which `set_replicas` must be called on."""

    def __init__(
        self,
        calls: ReplicaCalls,
        *,
        name: str,
        router: RouterConfig,
        has_session_logs: bool = False,
        warm_up: GenerationRequest | None = None,
        num_wanted: Callable[[], int | None] = lambda: None,
        starts_from_zero: bool = False,
        read_condition: Callable[[], Condition] = lambda: Condition("loading"),
    ) -> None:
        """Runs `warm_up` on every replica before requests; `num_wanted` says how many there should be.

        `starts_from_zero`: where there is none, one comes if it is asked for. `read_condition` may take a while: it
        says what becomes of replicas of which none can be asked.

        `has_session_logs`: replicas find in durable logs what one that does not answer knew of a session.
        """
        self._calls = calls
        self._name = name  # unique among ingresses: the subscriber's name at the replicas
        self.chooser = ReplicaChooser(router)
        self._hot = HotPrefixes()
        self._warm_up = warm_up
        self.num_wanted = num_wanted
        self._starts_from_zero, self._was_ready = starts_from_zero, False
        self._read_condition, self._condition = read_condition, (-inf, Condition("loading"))
        self._waking: asyncio.Task[None] | None = None
        self._num_waiting = 0  # requests and queries, for a replica
        self._links: dict[str, ReplicaLink] = {}
        self._opened = asyncio.Event()
        self._is_stopping = False
        self._closing: set[asyncio.Task[None]] = set()
        # Where this ingress last sent each session, and whether that is a fork that has had no turn yet.
        self._homes = Bounded[SessionKey, tuple[str, bool]](MAX_HOMES)
        self.has_session_logs = has_session_logs
        self._epochs: dict[str, str] = {}
        self._routes = Bounded[str, tuple[str, Route]](MAX_ROUTES)  # by request id, with its salt
        self._report_tasks: dict[str, asyncio.Task[None]] = {}
        self._asked_s = -inf
        self._said: dict[str, tuple[float, dict[str, Any]]] = {}  # each replica's last figures, and when it was asked
        self._stats_lock = asyncio.Lock()

    def set_replicas(self, replica_ids: Collection[str], *, waits: bool = True) -> None:
        """The replicas of now: new ones are linked, others are left, those that drain once they have (`waits`)."""
        for replica_id in self._links.keys() - set(replica_ids):
            link = self._links.pop(replica_id)
            task = asyncio.get_running_loop().create_task(link.leave() if waits else link.close())
            self._epochs.pop(replica_id, None)
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for replica_id in set(replica_ids) - self._links.keys():
            link = ReplicaLink(
                replica_id,
                self._calls,
                subscriber=f"{self._name}:{replica_id}",
                on_change=self._link_changed,
                on_report=self._reported,
                warm_up=self._warm_up,
                hot_prefixes=self._hot_prefixes,
            )
            self._links[replica_id] = link
            link.start()
        self._update_candidates()
        if self._num_waiting:
            self._wake_one()

    async def stop(self, grace_s: float) -> None:
        """Take no more requests; those that have not ended after `grace_s` end with an error.

        What replicas are saving is waited for, within `FLUSH_S`: the cache tier may be closed when this returns.
        """
        self._is_stopping = True
        clock = asyncio.get_running_loop().time
        deadline = clock() + grace_s
        while clock() < deadline and any(link.is_busy for link in self._links.values()):
            await asyncio.sleep(_STOP_POLL_S)
        with contextlib.suppress(MnemeError, TimeoutError):
            await asyncio.wait_for(self._flush_saves(), FLUSH_S)
        await self.close()

    async def _flush_saves(self) -> None:
        await asyncio.gather(*(self._try_one(replica_id, FlushSaves()) for replica_id in self._links))

    async def close(self) -> None:
        """Close all links."""
        self._is_stopping = True
        self.set_replicas((), waits=False)
        reports = list(self._report_tasks.values())
        for task in reports:
            task.cancel()
        await asyncio.gather(*self._closing)
        await asyncio.gather(*reports, return_exceptions=True)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[TokenEvent, None]:
        """See `EngineClient`; a lost replica is a pause, and an "error" event if nothing takes over."""
        choices = [PlacedChoice(request) for request in requests]
        num_losses = 0
        while choices:
            try:
                placement = await self._place(choices, is_resumed=num_losses > 0)
            except MnemeError as error:
                if not num_losses:
                    raise
                for event in _failures(choices, error):
                    yield event
                return
            try:
                async with contextlib.aclosing(placement.events()) as events:
                    async for event in events:
                        yield event
                self._remember(placement)
                return
            except LinkLost as lost:
                num_losses += 1
                logger.warning("request_id=%s losses=%d resuming: %s", choices[0].request.request_id, num_losses, lost)
            finally:
                placement.end()
            choices = [choice for choice in choices if not choice.is_finished]
            for choice in choices:
                choice.attempt += 1
            for choice in [choice for choice in choices if choice.is_complete()]:
                choices.remove(choice)
                yield TokenEvent(choice.request.request_id, (), "length", None, None)
            if num_losses > MAX_LOSSES:
                for event in _failures(choices, ReplicaUnavailable("replicas keep failing")):
                    yield event
                return

    async def stats(self) -> dict[str, dict[str, Any]]:
        """See `EngineClient.stats`."""
        clock = asyncio.get_running_loop().time
        async with self._stats_lock:
            if clock() - self._asked_s > STATS_MAX_AGE_S:
                asked_s, asked = clock(), [r for r, link in self._links.items() if link.is_open]
                answers = zip(asked, await asyncio.gather(*map(self._ask, asked)), strict=True)
                known = {replica_id: each for replica_id, each in self._said.items() if replica_id in self._links}
                self._said = known | {r: (asked_s, each) for r, each in answers if each is not None}
                self._asked_s = asked_s
            return {r: {**each, "age_s": self._asked_s - said_s} for r, (said_s, each) in self._said.items()}

    async def query(self, query: Query[R], *, replica_id: str | None = None) -> dict[str, R]:
        """See `EngineClient.query`; replicas whose stream is broken are asked too, as they may still hold sessions."""
        if not self._links:
            await self._wait_for_replica(asyncio.get_running_loop().time() + WAIT_FOR_REPLICA_S, has_tried=False)
        asked = [r for r in self._links if replica_id in (None, r)]
        if not asked:
            raise ReplicaUnavailable("no replica is ready" if replica_id is None else "that replica is gone")
        answers = await asyncio.gather(*(self._query_one(r, query) for r in asked))
        return dict(zip(asked, answers, strict=True))

    def replica_ids(self) -> list[str]:
        """See `EngineClient.replica_ids`."""
        return sorted(self._links, key=lambda replica_id: (not self._links[replica_id].is_open, replica_id))

    def place_fork(self, key: SessionKey, replica_id: str) -> None:
        """See `EngineClient.place_fork`."""
        self._homes[key] = replica_id, True

    def home_of(self, key: SessionKey) -> str | None:
        """See `EngineClient.home_of`."""
        home, _ = self._homes.get(key, (None, False))
        return home if home in self._links else None

    def record_prefix(self, token_ids: Sequence[int], replica_id: str, *, salt: str) -> None:
        """See `EngineClient.record_prefix`."""
        self.chooser.record(token_ids, replica_id, salt=salt)

    def routes(self, salt: str, http_id: str) -> list[ExplainedRoute]:
        """See `EngineClient.routes`."""
        return [
            {"request_id": request_id, **route.as_json()}
            for request_id, (of_salt, route) in self._routes.items()
            if of_salt == salt and is_of_request(request_id, http_id)
        ]

    def routing(self) -> Mapping[str, Any]:
        """See `EngineClient.routing`."""
        return {"decisions": self.chooser.decisions, "accuracy": self.chooser.accuracy}

    def num_ready(self) -> int:
        """See `EngineClient.num_ready`: a stream is open, and Ray breaks it when its replica dies."""
        return sum(link.is_open for link in self._links.values())

    async def condition(self) -> Condition:
        """See `EngineClient.condition`; what Serve says is at most as old as `stats`."""
        if self.num_ready():
            return Condition("ready")
        if any(link.is_late for link in self._links.values()):
            return Condition("stalled", STALLED)
        async with self._stats_lock:
            if time.monotonic() - self._condition[0] > STATS_MAX_AGE_S:
                try:
                    async with asyncio.timeout(FIRST_STATS_S):
                        found = await asyncio.to_thread(self._read_condition)
                except Exception as error:
                    logger.warning("the condition of replicas is not known: %s", type(error).__name__)
                    found = Condition("failed", "Ray Serve does not answer")
                self._condition = time.monotonic(), found
        return self._condition[1]

    async def _place(self, choices: Sequence[PlacedChoice], *, is_resumed: bool) -> Placement:
        """Submit to the best replica, then to the others; raises what the last one answered."""
        tried: set[str] = set()
        refusal: MnemeError = ReplicaUnavailable("no replica is ready")
        began_s = asyncio.get_running_loop().time()
        while True:
            if self._is_stopping:
                raise ReplicaUnavailable("the server is stopping")
            excluded = await self._excluded(choices[0].request)
            reservation = self._reserve(choices[0].remaining(), len(choices), exclude=tried | excluded)
            if reservation is None:
                if tried and not is_resumed and isinstance(refusal, Overloaded):
                    raise refusal
                patience_s = self._patience_s(is_resumed=is_resumed)
                due_s = asyncio.get_running_loop().time() + choices[0].time_left_s
                is_there = await self._wait_for_replica(min(began_s + patience_s, due_s), has_tried=bool(tried))
                if not is_there and self._patience_s(is_resumed=is_resumed) <= patience_s:
                    raise refusal if began_s + patience_s < due_s else DeadlineExceeded
                tried.clear()
                continue
            tried.add(reservation.replica_id)
            self._routes[choices[0].attempt_id] = choices[0].request.salt, reservation.route
            try:
                return await self._submit(choices, reservation)
            except LinkLost as lost:
                logger.warning("request_id=%s not taken: %s", choices[0].attempt_id, lost)
                refusal = ReplicaUnavailable("no replica has taken the request")
            except ReplicaUnavailable as unavailable:  # it stops, or cannot read the session's log
                refusal = unavailable
            except Overloaded as overloaded:
                refusal, request = _sooner(overloaded, refusal), choices[0].request
                if not is_resumed and self.chooser.is_answering(request.session_id, salt=request.salt):
                    raise  # elsewhere it would run beside the session's turn, not after it
            for choice in choices:
                choice.attempt += 1

    def _patience_s(self, *, is_resumed: bool) -> float:
        """Return how long to wait for a replica, after one was asked for where there is none."""
        self._wake_one()
        is_coming = any(link.is_coming for link in self._links.values())
        if self._starts_from_zero and not self.num_ready() and (is_coming or not self._links):
            return COLD_START_S
        return WAIT_FOR_REPLICA_S if is_resumed or is_coming or not self._was_ready else NO_REPLICA_S

    def _wake_one(self) -> None:
        is_waking = self._waking is not None and not self._waking.done()
        if self._starts_from_zero and not self._links and not is_waking and not self._is_stopping:
            self._waking = asyncio.get_running_loop().create_task(self._wake())

    async def _wake(self) -> None:
        with contextlib.suppress(Exception):  # whoever comes refuses this call
            async with asyncio.timeout(COLD_START_S):
                await self._calls.wake()

    def _reserve(self, request: GenerationRequest, num_choices: int, *, exclude: Collection[str]) -> Reservation | None:
        documents = []
        if request.documents and request.blend.mode != "off":
            sink_ids, ids = self.chooser.sink_ids(), request.prompt_token_ids
            documents = [(*sink_ids, *ids[span.start : span.end]) for span in request.documents]
        return self.chooser.select_and_reserve(
            request.prompt_token_ids,
            salt=request.kv_salt,
            session_id=request.session_id,
            affinity=request.affinity,
            num_choices=num_choices,
            exclude=exclude,
            documents=documents,
        )

    async def _excluded(self, request: GenerationRequest) -> set[str]:
        """Replicas where a request must not run: what is appended runs where its session is.

        One that no replica knows may have a durable log: whichever replica gets the turn looks there.
        """
        if request.session_id is None:
            return set()
        key = (request.salt, request.session_id)
        fork_home, is_fork = self._homes.get(key, (None, False))
        home = await self._home_of(key) if request.append else fork_home if is_fork else None
        if home not in self._links or (
            self.has_session_logs
            and self._links[home].is_draining
            and not self.chooser.is_answering(request.session_id, salt=request.salt)
        ):
            return set()
        return self._links.keys() - {home}

    async def _home_of(self, key: SessionKey) -> str | None:
        """The replica that has the session's newest copy; None: no replica knows it."""
        asked, ask = list(self._links), self._try_one if self.has_session_logs else self._query_one
        answers = await asyncio.gather(*(ask(r, GetSession(key)) for r in asked))
        found = newest(dict(zip(asked, answers, strict=True)))
        return None if found is None else found[0]

    async def _try_one(self, replica_id: str, query: Query[R]) -> R | None:
        """Query a replica; None if it does not answer."""
        try:
            return await self._query_one(replica_id, query)
        except ReplicaUnavailable:
            return None

    def _move_session(self, request: GenerationRequest, replica_id: str) -> None:
        """Note that the session lives here now, and have its old home drop the copy it left."""
        if request.session_id is None:
            return
        key = (request.salt, request.session_id)
        left, _ = self._homes.get(key, (None, False))
        self._homes[key] = replica_id, False
        if left in self._links and left != replica_id:
            task = asyncio.get_running_loop().create_task(self._leave(key, left))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _leave(self, key: SessionKey, replica_id: str) -> None:
        with contextlib.suppress(MnemeError):  # it expires by itself
            await self.query(LeaveSession(key), replica_id=replica_id)

    async def _query_one(self, replica_id: str, query: Query[R]) -> R:
        """A session whose log cannot be read or deleted now is asked for again, as a turn is placed again."""
        answer: Any = None
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                while True:
                    answer = await self._calls.call(replica_id, "query", query=query)
                    if not isinstance(answer, ReplicaUnavailable) or not isinstance(query, _OF_SESSIONS):
                        break
                    await asyncio.sleep(_PAUSE_S)
        except Exception as error:
            if answer is None:
                logger.warning("replica_id=%s query failed: %s", replica_id, type(error).__name__)
                late = f" within {QUERY_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else ""
                raise ReplicaUnavailable(f"a replica did not answer{late}") from error
        if isinstance(answer, MnemeError):
            raise answer
        found: R = answer
        return found

    async def _wait_for_replica(self, deadline: float, *, has_tried: bool) -> bool:
        """Wait for an open stream, at least a moment if all were tried; False when the time is up."""
        left_s = deadline - asyncio.get_running_loop().time()
        if left_s <= 0:
            return False
        if has_tried:
            await asyncio.sleep(min(_PAUSE_S, left_s))
        self._num_waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._opened.wait()
        finally:
            self._num_waiting -= 1
        return self._opened.is_set()

    async def _submit(self, choices: Sequence[PlacedChoice], reservation: Reservation) -> Placement:
        link = self._links[reservation.replica_id]
        placement = Placement(link, reservation, asyncio.Queue(), {c.attempt_id: c for c in choices})
        try:
            elsewhere = reservation.route.elsewhere_tokens
            requests = [replace(choice.remaining(), elsewhere_tokens=elsewhere) for choice in choices]
            refusals = await link.submit(requests, placement.sink)
        except BaseException:  # cancelled too: the request may be on its way
            placement.end()
            raise
        for choice, refusal in zip(choices, refusals, strict=True):
            if refusal is not None:
                placement.end()
                if isinstance(refusal, InvalidRequest):
                    refusal.request_id = choice.request.request_id
                raise refusal
        reservation.admitted()
        self._move_session(choices[0].request, reservation.replica_id)
        return placement

    def _remember(self, placement: Placement) -> None:
        """The replica now holds the answers' KV too: the next turn starts with them."""
        first = next(iter(placement.choices.values())).request
        if first.leaves_nothing:
            return
        if not first.append:
            self._hot.add(first.prompt_token_ids, salt=first.salt)
        for choice in placement.choices.values():
            tokens = (*choice.request.prompt_token_ids, *choice.emitted)
            self.chooser.record(tokens, placement.link.replica_id, salt=choice.request.salt)

    def _hot_prefixes(self) -> list[tuple[str, tuple[int, ...]]]:
        """What a new replica should have before its first request: while others answer, and of what they still hold.

        What was deleted, or has gone cold, nobody holds.
        """
        if not any(link.is_open for link in self._links.values()):
            return []
        return [(salt, ids) for salt, ids in self._hot.hottest(NUM_HOT) if self.chooser.is_held(ids, salt=salt)]

    def _link_changed(self, link: ReplicaLink) -> None:
        if link.epoch is not None and link.replica_id in self._links:
            if self._epochs.get(link.replica_id, link.epoch) != link.epoch:
                self.chooser.forget_prefixes(link.replica_id)  # the engine was started anew: it holds nothing
            self._epochs[link.replica_id] = link.epoch
        self._update_candidates()
        if link.is_open:
            self._ask_for_report(link.replica_id)

    def _reported(self, replica_id: str, report: ReplicaReport | None) -> None:
        if report is None:
            self.chooser.mark_silent(replica_id)
        if report is None or not self.chooser.apply_report(replica_id, report):
            self._ask_for_report(replica_id)

    def _ask_for_report(self, replica_id: str) -> None:
        """Have a replica say all that it holds, once at a time: this ingress has missed some of it."""
        if replica_id not in self._report_tasks:
            task = asyncio.get_running_loop().create_task(self._fetch_report(replica_id))
            self._report_tasks[replica_id] = task

    async def _fetch_report(self, replica_id: str) -> None:
        report = None
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                report = await self._calls.call(replica_id, "query", query=GetReport())
        except Exception as error:  # it is asked again after its next report
            logger.warning("replica_id=%s report failed: %s", replica_id, type(error).__name__)
        finally:
            del self._report_tasks[replica_id]
        if isinstance(report, ReplicaReport):
            self.chooser.apply_report(replica_id, report)  # if that lacks something too, the next report will ask

    def _update_candidates(self) -> None:
        open_ids = [replica_id for replica_id, link in self._links.items() if link.is_open]
        self.chooser.set_replicas(open_ids)
        if open_ids:
            self._was_ready = True
            self._opened.set()
        else:
            self._opened.clear()

    async def _ask(self, replica_id: str) -> dict[str, Any] | None:
        try:
            timeout_s = STATS_TIMEOUT_S if replica_id in self._said else FIRST_STATS_S
            return await asyncio.wait_for(self._calls.call(replica_id, "stats"), timeout_s)
        except Exception as error:  # what it said last stands
            logger.warning("replica_id=%s stats failed: %s", replica_id, type(error).__name__)
            return None


def _sooner(overloaded: Overloaded, other: MnemeError) -> Overloaded:
    """Choose the refusal of the replica that will have room first."""
    if isinstance(other, Overloaded) and other.retry_after_s < overloaded.retry_after_s:
        return other
    return overloaded


def _failures(choices: Sequence[PlacedChoice], error: MnemeError) -> list[TokenEvent]:
    return [TokenEvent(choice.request.request_id, (), "error", None, None, str(error), error) for choice in choices]
