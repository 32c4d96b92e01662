"""The fair queue against a model that looks at everything each time, and what it promises."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import tracemalloc
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.replicas.schedule.queue import MAX_IDLE_FLOWS, MAX_PRIORITY_S, WaitingQueue
from mneme.replicas.sequence import Sequence
from tests.budget import examples

PARAMS = SamplingParams()


class Arrivals:
    """Makes sequences, each later than the one before."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def __call__(self, flow: str | None, num_tokens: int = 1, salt: str = "", priority: int = 0) -> Sequence:
        arrival = next(self._count)
        request = GenerationRequest(
            request_id=str(arrival),
            prompt_token_ids=(0,),
            sampling=PARAMS,
            salt=salt,
            session_id=flow,
            priority=priority,
        )
        ids = [0] * num_tokens
        return Sequence(request=request, ids=ids, num_prompt=num_tokens, max_tokens=1, arrival=arrival)


def names(sequences: Any) -> list[str]:
    return [sequence.request.request_id for sequence in sequences]


def drained(queue: WaitingQueue) -> list[Sequence]:
    """All that wait, in the order of being taken, each with its whole prompt to compute."""
    taken = []
    while queue:
        taken.append(queue.pop(len(queue.head.ids)))
    return taken


class Model:
    """Counters and lists, searched anew for each question."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self.since: dict[str, int] = {}
        self.waiting: list[Sequence] = []
        self.suspended: list[Sequence] = []
        self.running: list[Sequence] = []
        self.level = 0.0
        self.last: str | None = None
        self.sticky: Sequence | None = None

    def add(self, sequence: Sequence) -> None:
        flow = str(sequence.request.session_id)
        if not self.of(self.waiting, flow):
            flows = {str(each.request.session_id) for each in self.waiting} or {self.last} - {None}
            floor = min((self.counters[each] for each in flows if each is not None), default=0.0)
            self.counters[flow] = max(self.counters.get(flow, 0.0), floor, self.level)
            self.since[flow] = sequence.arrival
        self.waiting.append(sequence)

    def head(self) -> Sequence:
        if self.suspended:
            return min(self.suspended, key=lambda each: each.arrival)
        if self.sticky is None:
            flows = {str(each.request.session_id) for each in self.waiting}
            flow = min(flows, key=lambda each: (self.counters[each], self.since[each]))
            self.sticky = min(self.of(self.waiting, flow), key=lambda each: (each.due_s, each.arrival))
        return self.sticky

    def pop(self, num_computed: int) -> Sequence:
        sequence = self.head()
        if sequence in self.suspended:
            self.suspended.remove(sequence)
        else:
            self.waiting.remove(sequence)
            self.sticky, self.last = None, str(sequence.request.session_id)
            self.charge(sequence, max(num_computed, 1), [*self.waiting, *self.suspended, *self.running, sequence])
        self.running.append(sequence)
        return sequence

    def charge(self, sequence: Sequence, num_tokens: int, active: list[Sequence]) -> None:
        self.counters[str(sequence.request.session_id)] += num_tokens
        self.level += num_tokens / len({each.request.session_id for each in active})

    def suspend(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.suspended.append(sequence)

    def end(self, sequence: Sequence) -> None:
        for each in (self.waiting, self.suspended, self.running):
            if sequence in each:
                each.remove(sequence)
        if sequence is self.sticky:
            self.sticky = None
        if not self.active:
            self.counters, self.level, self.last = {}, 0.0, None

    @property
    def active(self) -> list[Sequence]:
        return [*self.waiting, *self.suspended, *self.running]

    @staticmethod
    def of(sequences: list[Sequence], flow: str) -> list[Sequence]:
        return [each for each in sequences if str(each.request.session_id) == flow]


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "pop", "head", "charge", "suspend", "end", "abort"]),
        st.sampled_from([None, "a", "b", "c", "d"]),
        st.integers(0, 40),
        st.sampled_from([0.0, 0.0, 1.0, 2.0]),  # due
    ),
    max_size=60,
)


@settings(max_examples=examples(400))
@given(steps)
def test_any_use_gives_the_order_of_the_model(todo: list[tuple[str, str | None, int, float]]) -> None:
    queue, model, make = WaitingQueue(), Model(), Arrivals()
    for what, flow, number, due_s in todo:
        waiting = [*model.waiting, *model.suspended]
        if what == "add":
            sequence = make(flow, max(number, 1))
            sequence.due_s = due_s
            queue.add(sequence)
            model.add(sequence)
        elif what == "abort" and waiting:
            sequence = waiting[number % len(waiting)]
            queue.remove(sequence)
            model.end(sequence)
        elif what in ("pop", "head") and waiting:
            assert queue.head is model.head()
            if what == "pop":
                assert queue.pop(number) is model.pop(number)
        elif model.running:
            sequence = model.running[number % len(model.running)]
            if what == "charge":
                queue.charge([sequence], number)
                model.charge(sequence, number, model.active)
            elif what == "suspend":
                queue.put_back(sequence)
                model.suspend(sequence)
            elif what == "end":
                queue.end(sequence)
                model.end(sequence)
        assert len(queue) == len(model.waiting) + len(model.suspended)
        assert queue.num_tokens == sum(len(each.ids) for each in (*model.waiting, *model.suspended))
        in_order = names(queue)
        assert in_order == names(drained(copy.deepcopy(queue)))
        assert sorted(in_order) == sorted(names([*model.waiting, *model.suspended]))


def test_flows_that_always_want_more_get_alike() -> None:
    """The difference is at most one request of each, whatever their sizes (the bound of the paper's theorem)."""
    queue, make, rng = WaitingQueue(), Arrivals(), random.Random(1)
    sizes = {"small": 10, "large": 700, "mixed": 0}
    served = dict.fromkeys(sizes, 0)
    for flow, size in sizes.items():
        for _ in range(3):
            queue.add(make(flow, size or rng.randrange(1, 300)))
    for _ in range(2000):
        sequence = queue.pop(len(queue.head.ids))
        flow = str(sequence.request.session_id)
        served[flow] += len(sequence.ids)
        queue.add(make(flow, sizes[flow] or rng.randrange(1, 300)))
        queue.end(sequence)
        assert max(served.values()) - min(served.values()) <= 2 * 700


def test_an_endless_row_of_new_flows_starves_nobody() -> None:
    queue, make = WaitingQueue(), Arrivals()
    flows = ["greedy", *(f"first {number}" for number in range(11))]
    for flow in flows:
        queue.add(make(flow, 100))
    assert queue.pop(10_000).request.session_id == "greedy"
    wants_more = make("greedy", 1)
    queue.add(wants_more)
    for number in itertools.count():
        queue.add(make(f"new {number}", 100))
        taken = queue.pop(100)
        if taken is wants_more:
            break
        queue.end(taken)
        # 13 active flows share 100 tokens of each: after 1,300 requests all might have had 10,000.
        assert number < 1300 + 13
    assert number > 600  # and until then the others were in the right


def test_a_tenant_s_requests_without_a_session_are_one_flow() -> None:
    queue, make = WaitingQueue(), Arrivals()
    for salt in ("one", "one", "one", "two"):
        queue.add(make(None, 10, salt))
    assert [each.request.salt for each in drained(queue)] == ["one", "two", "one", "one"]


def test_flows_that_are_gone_cost_nothing() -> None:
    queue, make = WaitingQueue(), Arrivals()
    stuck = make("stuck", 10)
    queue.add(stuck)
    assert queue.head is stuck

    def passing(first: int) -> int:
        """Bytes that the queue has grown by as flows came and went."""
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(first, first + 3 * MAX_IDLE_FLOWS):
            sequence = make(f"flow {number}", 10)
            queue.add(sequence)
            queue.remove(sequence)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        passing(0)
        assert passing(3 * MAX_IDLE_FLOWS) < 20 * MAX_IDLE_FLOWS  # a flow that stayed would have hundreds
    finally:
        tracemalloc.stop()
    queue.remove(stuck)
    assert (len(queue), queue.num_tokens, list(queue)) == (0, 0, [])


def test_who_overtakes_the_head_leaves_it_the_head() -> None:
    """The head may be of its own flow or another; the overtaking flow pays for it."""
    queue, arrive = WaitingQueue(), Arrivals()
    head, same, other, last = (arrive(flow, 10) for flow in ("a", "a", "b", "c"))
    for sequence in (head, same, other, last):
        queue.add(sequence)
    assert queue.head is head
    queue.overtake(other, 10)
    queue.overtake(same, 10)
    assert queue.head is head
    again = arrive("b", 10)
    queue.add(again)
    assert (len(queue), queue.num_tokens, queue.num_taken_tokens) == (3, 30, 20)
    assert names(queue) == names(drained(queue)) == names([head, last, again])


def test_the_head_stays_the_head_whoever_is_due_sooner() -> None:
    """Else a large one, for which there are no pages yet, would be overtaken in its own flow without end."""
    queue, arrive = WaitingQueue(), Arrivals()
    head, later, urgent = (arrive("a", 10, priority=priority) for priority in (0, 0, -60))
    head.due_s = 5.0
    queue.add(head)
    assert queue.head is head
    for sequence in (later, urgent):
        queue.add(sequence)
        assert queue.head is head
    assert names(queue) == names(drained(queue)) == names([head, urgent, later])


PRIORITIES = st.one_of(st.integers(-70, 70), st.sampled_from([-(2**40), 2**40]))


@given(st.lists(st.tuples(PRIORITIES, st.floats(0, 30), st.floats(0, 20), st.integers(0, 3)), max_size=60))
def test_priorities_order_a_flow_and_starve_nobody(todo: list[tuple[int, float, float, int]]) -> None:
    """Whoever comes `2 * MAX_PRIORITY_S` after another was due goes behind it, whatever both say."""
    queue, make, taken, now_s = WaitingQueue(), Arrivals(), list[Sequence](), 0.0
    came_s: dict[Sequence, float] = {}
    for priority, pause_s, takes_s, num_taken in todo:
        now_s += pause_s
        sequence = make(None, 5, priority=priority)
        came_s[sequence], sequence.due_s = now_s, now_s + takes_s
        queue.add(sequence)
        while queue and num_taken > 0:
            taken.append(queue.pop(5))
            num_taken -= 1
    waiting = drained(queue)
    for index, sequence in enumerate(taken + waiting):
        for earlier in (taken + waiting)[:index]:
            assert came_s[earlier] <= sequence.due_s + 2 * MAX_PRIORITY_S
    moved_s = [s.due_s + max(-MAX_PRIORITY_S, min(s.request.priority, MAX_PRIORITY_S)) for s in waiting]
    assert moved_s == sorted(moved_s)


@given(st.lists(st.tuples(PRIORITIES, st.sampled_from("abc"), st.booleans()), max_size=60))
def test_one_tenant_s_priorities_leave_the_others_their_turns(todo: list[tuple[int, str, bool]]) -> None:
    def tenants(uses_priorities: bool) -> list[str]:
        queue, make, taken = WaitingQueue(), Arrivals(), list[Sequence]()
        for priority, tenant, takes in todo:
            queue.add(make(None, 7, tenant, priority if uses_priorities else 0))
            if takes:
                taken.append(queue.pop(7))
        return [sequence.request.salt for sequence in taken + drained(queue)]

    assert tenants(True) == tenants(False)
