"""Requests that wait for pages, in the order in which they will run: fair between flows, earliest due first in each.

A flow is a session, or what a tenant asks without one. Each has a counter of the service it was given: the tokens of
its prompts that are computed, charged when they are admitted, and twice its output tokens, as they come (Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024: virtual token counter, weights 1 and 2). The flow with the
least goes next, ties by arrival. A flow that begins to wait is lifted to the least of those that wait, so that idle
time earns no credit; and to the *level*: what each active flow would have had if all service had been shared alike.
The paper's set of clients is fixed; here each session is a new flow, and without the level an endless row of new
sessions would stay ahead of a flow that had more than they. The level rises with every token, so nobody starves; it
never falls, so where each flow has one request the order is that of arrival.

Within a flow the order is by `Sequence.due_s`, when its prompt would be done had it begun as it came; where costs are
not known, by arrival. A request's priority moves it there by so many seconds, at most `MAX_PRIORITY_S`: who comes later
than that, and what their prompts take, goes behind it whatever its priority. Between flows it counts for nothing, so no
tenant has more by it.

The head, once it was asked for, stays the head until it is taken or removed: a large request that does not fit yet is
overtaken by nobody but suspended sequences, which go before all others by arrival; one that waits for the cache tier,
also by requests that do not hold it up (`Scheduler._admit_behind`). Policy only: no tensors.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from mneme.primitives import Bounded
from mneme.replicas.request import GenerationRequest
from mneme.replicas.sequence import Sequence

OUTPUT_WEIGHT = 2  # service of an output token, in prompt tokens
MAX_IDLE_FLOWS = 1024  # whose counters are remembered; the longest idle are forgotten, and come back at the level
MAX_PRIORITY_S = 60.0  # a step of priority is a second
_HEAP_SLACK = 64  # entries of flows that wait no more, before they are swept

FlowKey = tuple[str, str | None]  # (tenant salt, session id or None)


@dataclass(slots=True, eq=False)
class _Flow:
    """A flow with requests that wait or run."""

    counter: float
    num_active: int = 0  # requests, waiting or running
    since: int = 0  # the arrival with which it began to wait
    waiting: list[Sequence] = field(default_factory=list)  # but for suspended ones, by when they are due
    is_ranked: bool = False  # has its entry in the heap

    @property
    def rank(self) -> tuple[float, int]:
        return self.counter, self.since


class WaitingQueue:
    """Orders the requests that the scheduler admits from."""

    def __init__(self) -> None:
        self.num_tokens = 0  # of all that wait, resident or not
        self.num_taken_tokens = 0  # of all that were ever taken out to run
        self._num_counted: dict[Sequence, int] = {}  # tokens of each that waits, as it came: it may get shorter here
        self._suspended: list[Sequence] = []  # by arrival
        self._flows: dict[FlowKey, _Flow] = {}  # the active ones
        self._idle = Bounded[FlowKey, float](MAX_IDLE_FLOWS)  # counters, the longest idle first
        # One entry for each flow that waits. Counters, and since when it waits, only grow: an entry may be too small,
        # never too large: it is set right when it comes to the top.
        self._heap: list[tuple[float, int, _Flow]] = []
        self._chosen: _Flow | None = None  # whose first request is the head
        self._last_taken: _Flow | None = None
        self._level = 0.0

    def __len__(self) -> int:
        return len(self._num_counted)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield requests as they will run if each computes its whole prompt and nothing else happens; lazily.

        Nothing may be added or removed meanwhile.
        """
        yield from self._suspended
        yield from self.unstarted

    @property
    def unstarted(self) -> Iterator[Sequence]:
        """Yield those that were never taken out to run, likewise."""
        chosen = self._chosen
        if chosen is not None:
            yield chosen.waiting[0]
        frontier: list[tuple[float, int, _Flow, int, int | None]] = []  # rank, flow, which request, place in the heap
        self._unroll(frontier, 0)
        while frontier:
            counter, arrival, flow, index, place = heapq.heappop(frontier)
            if place is not None:
                self._unroll(frontier, 2 * place + 1)
                self._unroll(frontier, 2 * place + 2)
                index, spent = (1, _size(flow.waiting[0])) if flow is chosen else (0, 0)
                if index >= len(flow.waiting):
                    continue
                rank = flow.counter + spent, flow.since
                if rank != (counter, arrival):
                    heapq.heappush(frontier, (*rank, flow, index, None))
                    continue
            sequence = flow.waiting[index]
            yield sequence
            if index + 1 < len(flow.waiting):
                after = counter + _size(sequence), flow.since
                heapq.heappush(frontier, (*after, flow, index + 1, None))

    @property
    def head(self) -> Sequence:
        """Return who runs next; raises `IndexError` if nobody waits."""
        if self._suspended:
            return self._suspended[0]
        if self._chosen is None:
            self._chosen = self._least()
        if self._chosen is None:
            raise IndexError("nobody waits")
        return self._chosen.waiting[0]

    @property
    def chosen(self) -> Sequence | None:
        """Return who was the head, and is again behind those that are suspended."""
        return None if self._chosen is None else self._chosen.waiting[0]

    def add(self, sequence: Sequence) -> None:
        """Add a request that has arrived."""
        key = _flow_key(sequence.request)
        flow = self._flows.get(key)
        start = self._start() if flow is None or not flow.waiting else 0.0
        if flow is None:
            flow = self._flows[key] = _Flow(self._idle.pop(key, 0.0))
        flow.counter = max(flow.counter, start)
        flow.num_active += 1
        if not flow.waiting:
            flow.since = sequence.arrival
        first = 1 if flow is self._chosen else 0  # the head stays the head
        insort(flow.waiting, sequence, first, key=_place)
        self._count(sequence)
        if not flow.is_ranked:
            flow.is_ranked = True
            heapq.heappush(self._heap, (*flow.rank, flow))

    def put_back(self, sequence: Sequence) -> None:
        """Let a suspended sequence wait: before all others, behind earlier arrivals of its kind."""
        insort(self._suspended, sequence, key=lambda each: each.arrival)
        self._count(sequence)

    def pop(self, num_computed: int) -> Sequence:
        """Take the head out to run; its flow is charged the tokens it has to compute, but once only."""
        sequence = self.head
        if self._suspended:
            self._suspended.pop(0)
            self._count_taken(sequence)
        else:
            self._chosen = None
            self._remove(sequence, num_computed)
        return sequence

    def overtake(self, sequence: Sequence, num_computed: int) -> None:
        """Take one out to run that is behind the head, which stays the head, and is not suspended."""
        assert sequence is not self.head
        self._remove(sequence, num_computed)

    def _remove(self, sequence: Sequence, num_computed: int) -> None:
        flow = self._flows[_flow_key(sequence.request)]
        flow.waiting.remove(sequence)
        self._last_taken = flow
        self.charge([sequence], max(num_computed, 1))
        self._count_taken(sequence)

    def _count_taken(self, sequence: Sequence) -> None:
        self.num_taken_tokens += self._uncount(sequence)

    def charge(self, sequences: Collection[Sequence], num_tokens: int) -> None:
        """Charge the flows of these sequences, which are active, so much service for each."""
        flows = self._flows
        for sequence in sequences:
            request = sequence.request
            flows[request.salt, request.session_id].counter += num_tokens
        if sequences:
            self._level += num_tokens * len(sequences) / len(self._flows)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended while it waited."""
        if sequence in self._suspended:
            self._suspended.remove(sequence)
        else:
            flow = self._flows[_flow_key(sequence.request)]
            if flow is self._chosen and flow.waiting[0] is sequence:
                self._chosen = None
            flow.waiting.remove(sequence)
        self._uncount(sequence)
        self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        """Note that a sequence that was taken out has ended: its flow may be idle now."""
        key = _flow_key(sequence.request)
        flow = self._flows[key]
        flow.num_active -= 1
        if flow.num_active == 0:
            del self._flows[key]
            self._idle[key] = flow.counter
        if not self._flows:  # all is quiet: nobody owes anybody
            self._idle.clear()
            self._last_taken, self._level = None, 0.0
        if len(self._heap) > 2 * len(self._flows) + _HEAP_SLACK or not self._flows:
            self._sweep()

    def _start(self) -> float:
        """Return what a flow that begins to wait has at least."""
        least = self._least() or self._last_taken
        return self._level if least is None else max(self._level, least.counter)

    def _least(self) -> _Flow | None:
        while self._heap:
            *rank, flow = self._heap[0]
            if not flow.waiting:
                heapq.heappop(self._heap)
                flow.is_ranked = False
            elif tuple(rank) != flow.rank:
                heapq.heapreplace(self._heap, (*flow.rank, flow))
            else:
                return flow
        return None

    def _sweep(self) -> None:
        for _, _, flow in self._heap:
            flow.is_ranked = bool(flow.waiting)
        self._heap = [(*flow.rank, flow) for _, _, flow in self._heap if flow.waiting]
        heapq.heapify(self._heap)

    def _unroll(self, frontier: list[tuple[float, int, _Flow, int, int | None]], place: int) -> None:
        if place < len(self._heap):
            heapq.heappush(frontier, (*self._heap[place], 0, place))

    def _count(self, sequence: Sequence) -> None:
        self._num_counted[sequence] = len(sequence.context)
        self.num_tokens += len(sequence.context)

    def _uncount(self, sequence: Sequence) -> int:
        num_tokens = self._num_counted.pop(sequence)
        self.num_tokens -= num_tokens
        return num_tokens


def _flow_key(request: GenerationRequest) -> FlowKey:
    return request.salt, request.session_id


def _place(sequence: Sequence) -> tuple[float, int]:
    moved_s = max(-MAX_PRIORITY_S, min(sequence.request.priority, MAX_PRIORITY_S))
    return sequence.due_s + moved_s, sequence.arrival


def _size(sequence: Sequence) -> int:
    return max(len(sequence.context), 1)
