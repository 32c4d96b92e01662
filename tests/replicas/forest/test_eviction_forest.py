"""Owners, runs and pins of the forest against a model: page contents, sessions and scores in plain dictionaries."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mneme.cachetier.policy.eviction import make_policy
from mneme.errors import PinRefused
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.page_store import OutOfPages
from mneme.replicas.forest.paths import Path
from mneme.replicas.forest.tree import Owner, Page
from tests.budget import examples
from tests.replicas.fake_runner import Clock

SessionName = tuple[str, str]  # (tenant salt, session)

PAGE_SIZE = 4
POLICIES = ["lru", "pensieve", "lookahead"]


class NamedForest(PrefixForest):
    """Owners have names here: (tenant salt, session)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.owner: defaultdict[SessionName, Owner] = defaultdict(Owner)


def make_forest(num_pages: int, name: Any = "lru", clock: Clock | None = None, **options: Any) -> NamedForest:
    """Look-ahead windows are long enough for any queue here."""
    clock = clock or Clock()
    policy = make_policy(name, clock, 100 * num_pages)
    return NamedForest(num_pages, PAGE_SIZE, policy=policy, clock=clock, **options)


def hold(forest: PrefixForest, ids: list[int], salt: str = "") -> Path:
    path = forest.open_path(salt)
    path.extend(ids, len(ids))
    path.write(ids, len(ids))
    return path


def turn(forest: NamedForest, ids: list[int], owner: str | None = None) -> None:
    forest.release(hold(forest, ids), None if owner is None else forest.owner["", owner])
    forest.check()


def num_found(forest: PrefixForest, ids: list[int]) -> int:
    path = forest.open_path("")
    found = path.extend(ids, len(ids))
    forest.release(path)
    forest.check()
    return found


def test_the_trailing_half_goes_first_and_no_page_before_it_must() -> None:
    clock = Clock()
    forest = make_forest(10, "pensieve", clock)
    turn(forest, [2] * 24, "large")
    turn(forest, [3] * 16, "small")
    clock.now_s = 1.0
    path = hold(forest, [5] * 4)
    assert num_found(forest, [2] * 24) == 20  # the lookup made it young, and ended the choice
    clock.now_s = 2.0
    path.write([5] * 8, 8)
    assert num_found(forest, [3] * 16) == 12


def test_a_half_that_was_chosen_goes_on_to_its_end() -> None:
    clock = Clock()
    forest = make_forest(10, "pensieve", clock)
    turn(forest, [2] * 24, "large")
    turn(forest, [3] * 16, "small")
    clock.now_s = 1.0
    ids, path = [5] * 20, hold(forest, [5] * 4)
    for num_pages in range(2, 5):  # three of six, then the four of the other are more than three
        path.write(ids, 4 * num_pages)
    assert (num_found(forest, [2] * 24), num_found(forest, [3] * 16)) == (12, 12)


def test_a_run_ends_where_another_sessions_path_does() -> None:
    """Else a session would weigh, and take along, the history of another that goes on from there."""
    forest = make_forest(40)
    long, short = hold(forest, [2] * 24), hold(forest, [2] * 16)
    forest.release(short, forest.owner["", "short"])
    forest.release(long, forest.owner["", "long"])

    def num_pages() -> list[int]:
        forest.device.rank()
        return [candidate.num_pages for candidate in forest.device.policy.candidates.values()]

    assert num_pages() == [2]
    forest.abandon(None, owner=forest.owner["", "short"])
    assert num_pages() == [6]
    forest.check()


def test_without_sharing_nothing_is_pinned_or_owned() -> None:
    forest = make_forest(8, sharing=False)
    path = hold(forest, [1] * 8)
    with pytest.raises(PinRefused):
        forest.pin("", [1] * 8)
    forest.release(path, forest.owner["", "a"])
    forest.check()
    assert (len(forest.device.free), len(forest.owners)) == (8, 0)


def idle_leaves(forest: PrefixForest) -> list[Page]:
    return [page for page in pages_of(forest) if not page.refs and not page.children]


def pages_of(forest: PrefixForest) -> set[Page]:
    return {page for root in forest.roots.values() for page in root.below_it()}


class ForestMachine(RuleBasedStateMachine):
    """What is written is remembered by page; sessions by the ids of their last paths."""

    policy = "lru"

    @initialize(num_pages=st.integers(6, 24))
    def start(self, num_pages: int) -> None:
        self.clock = Clock()
        self.waiting: list[SessionName | None] = []
        self.forest = make_forest(num_pages, self.policy, self.clock)
        self.forest.look_ahead(lambda: [None if name is None else self.forest.owner[name] for name in self.waiting])
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}  # (page, offset) -> (position, token)
        self.running: list[tuple[Path, list[int], str]] = []
        self.pins: list[tuple[Path, list[int]]] = []
        self.sessions: dict[SessionName, list[int]] = {}  # ids of the last path
        self.claimed: dict[SessionName, int] = {}  # the evictions before a session's last path was released
        self.resident: dict[tuple[str, tuple[int, ...]], int] = {}  # released paths, with the evictions before that
        self.num_evicted = 0
        device = self.forest.device
        remove, choose = device.remove, device.choose

        def counted(page: Page) -> None:
            self.num_evicted += not page.refs
            remove(page)

        def judged_choice() -> Page | None:
            if device.victim is not None:  # chosen before, with what goes with it
                return choose()
            before = idle_leaves(self.forest)
            best = self.best_key(before) if before else None
            leaf = choose()
            if leaf is not None:
                assert best is not None
                assert self.key(leaf) == best
            return leaf

        device.remove = counted  # type: ignore[method-assign]
        device.choose = judged_choice  # type: ignore[method-assign]

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=24), salt=st.sampled_from(["", "t"]))
    def begin(self, ids: list[int], salt: str) -> None:
        path = self.forest.open_path(salt)
        found = path.extend(ids, len(ids))
        evicted_then = self.resident.get((salt, tuple(ids)))
        assert found == len(ids) or evicted_then != self.num_evicted, "what was released is lost"
        self.running.append((path, list(ids), salt))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 12), token=st.integers(0, 1))
    def write(self, data: st.DataObject, num_tokens: int, token: int) -> None:
        path, ids, _ = data.draw(st.sampled_from(self.running))
        path.extend(ids, len(ids))
        if path.num_tokens == len(ids):
            ids.append(token)
            path.extend(ids, len(ids))
        self.write_checked(path, ids, min(len(ids), path.num_tokens + num_tokens))

    @rule(
        data=st.data(),
        kept=st.sampled_from([0.3, 0.6, 1.0, 1.0]),
        more=st.lists(st.integers(0, 1), max_size=9),
        session=st.sampled_from([None, "a", "b", "c", "d", "e"]),
    )
    def turn(self, data: st.DataObject, kept: float, more: list[int], session: str | None) -> None:
        """A whole turn: on the history of this session or of another, all of it or its beginning."""
        history = data.draw(st.sampled_from([*self.sessions.values(), []]))
        ids = [*history[: int(len(history) * kept)], *more][: 4 * PAGE_SIZE]
        path = self.forest.open_path("")
        path.extend(ids, len(ids))
        self.write_checked(path, ids, len(ids))
        self.released(path, ids, "", session)

    def write_checked(self, path: Path, ids: list[int], end: int) -> None:
        start = path.num_tokens
        if start == end:
            return
        available = self.forest.device.num_available
        needed = path.num_new_pages(ids, end)
        try:
            runs = path.write(ids, end)
        except OutOfPages:
            assert needed > available
            return
        fresh = set(self.forest.store.drain_moves().fresh)
        assert len(fresh) == needed <= available
        self.slots = {slot: content for slot, content in self.slots.items() if slot[0] not in fresh}
        position = start
        for page, offset, count in runs:
            for index in range(count):
                assert (page, offset + index) not in self.slots
                self.slots[page, offset + index] = (position, ids[position])
                position += 1
        assert position == end

    @precondition(lambda self: self.running)
    @rule(data=st.data(), session=st.sampled_from([None, "a", "b", "c", "d", "e"]))
    def release(self, data: st.DataObject, session: str | None) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        path, ids, salt = self.running.pop(index)
        self.released(path, ids, salt, session)

    def released(self, path: Path, ids: list[int], salt: str, session: str | None) -> None:
        kept = ids[: path.num_tokens]
        if kept:
            self.resident[salt, tuple(kept)] = self.num_evicted
        if session is not None and kept:
            self.sessions[salt, session] = kept
            self.claimed[salt, session] = self.num_evicted
        self.forest.release(path, None if session is None else self.forest.owner[salt, session])

    @rule(session=st.sampled_from(["a", "b", "c", "d", "e"]), salt=st.sampled_from(["", "t"]))
    def abandon(self, session: str, salt: str) -> None:
        self.sessions.pop((salt, session), None)
        self.forest.abandon(None, owner=self.forest.owner[salt, session])

    @rule(session=st.sampled_from(["a", "b", "c", "d", "e"]), salt=st.sampled_from(["", "t"]))
    def delete(self, session: str, salt: str) -> None:
        """From the end of the path up: what nobody holds, no other session ends at and nothing goes on from."""
        tail = self.tail_of((salt, session))
        self.sessions.pop((salt, session), None)
        before, others, expected = pages_of(self.forest), self.tails(), set[Page]()
        while tail is not None and tail.parent is not None and not tail.refs and tail not in others:
            if not set(tail.children.values()) <= expected:
                break
            expected.add(tail)
            tail = tail.parent
        num_free = len(self.forest.device.free)
        self.forest.delete(self.forest.owner[salt, session], None)
        assert before - pages_of(self.forest) == expected
        assert len(self.forest.device.free) == num_free + len(expected)
        self.num_evicted += bool(expected)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_kept=st.integers(0, 10))
    def pin(self, data: st.DataObject, num_kept: int) -> None:
        running, ids, salt = data.draw(st.sampled_from(self.running))
        ids = ids[: running.num_tokens]
        path = self.forest.open_path(salt)
        path.extend(ids, len(ids))
        pinned = {page for pin, _ in self.pins for page in pin.page_ids} | set(path.page_ids)
        left = self.forest.device.num_pages - len(pinned)
        try:
            pin = self.forest.pin(salt, ids, num_kept_tokens=num_kept * PAGE_SIZE)
        except PinRefused:
            assert not path.pages or left < max(num_kept, self.forest.num_reserved)
        else:
            assert self.forest.capacity == left * PAGE_SIZE >= max(num_kept, self.forest.num_reserved) * PAGE_SIZE
            self.pins.append((pin, ids))
        self.forest.release(path)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin, _ = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.forest.release(pin)

    @rule(seconds=st.sampled_from([0.25, 1.0, 16.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule(sessions=st.lists(st.sampled_from([None, ("", "a"), ("", "b"), ("t", "a"), ("", "e")]), max_size=4))
    def queue(self, sessions: list[SessionName | None]) -> None:
        self.waiting = sessions

    @rule()
    def clear(self) -> None:
        self.forest.clear()
        assert self.forest.device.num_cached == 0

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "forest"):
            return
        self.forest.check()
        for path, ids, _ in self.running:
            assert self.visible(path) == ids[: path.num_tokens]
        for pin, ids in self.pins:
            assert self.visible(pin) == ids
        pinned = {page for pin, _ in self.pins for page in pin.page_ids}
        assert self.forest.capacity == (self.forest.device.num_pages - len(pinned)) * PAGE_SIZE
        held = pinned | {page for path, _, _ in self.running for page in path.page_ids}
        assert self.forest.device.num_in_use == len(held)
        assert len(self.forest.owners) == len(self.sessions)
        for name, ids in self.sessions.items():
            self.check_owner(name, ids)

    def check_owner(self, name: SessionName, ids: list[int]) -> None:
        """What is left of its path is found from the root, token by token."""
        tail = self.tail_of(name)
        if self.claimed[name] == self.num_evicted:
            assert tail.start < len(ids) <= tail.end
        end = len(ids)
        if tail is not None and self.claimed[name] != self.num_evicted:
            end = tail.start + 1  # the page may go on with another's tokens, if the path went on in one that is gone
        while tail is not None and tail.parent is not None:
            count = min(tail.end, end) - tail.start
            assert count > 0
            assert tail.tokens[:count].tolist() == ids[tail.start : tail.start + count]
            end, tail = tail.start, tail.parent

    def visible(self, path: Path) -> list[int]:
        seen = []
        for page, mask in zip(path.page_ids, path.all_masks().tolist(), strict=True):
            for offset in range(PAGE_SIZE):
                position, token = self.slots.get((page, offset), (2**30, -1))
                if mask >> offset & 1 and position < path.num_tokens:
                    seen.append((position, token))
        assert [position for position, _ in sorted(seen)] == list(range(path.num_tokens))
        return [token for _, token in sorted(seen)]

    def tails(self) -> set[Page]:
        return {tail for name in self.sessions if (tail := self.tail_of(name)) is not None}

    def tail_of(self, name: SessionName) -> Page | None:
        return self.forest.owners.tail_of(self.forest.owner[name])

    def size(self, leaf: Page) -> int:
        """Pages that evicting the leaf's session would free, counted anew."""
        tails, count, page = self.tails(), 1, leaf
        while (parent := page.parent) is not None and parent.parent is not None:
            alone = len(parent.children) == 1 and not parent.refs and parent not in tails
            if not alone or parent.released != leaf.released:
                break
            count, page = count + 1, parent
        return count

    def key(self, leaf: Page) -> tuple[float, ...]:
        """What decides the order, largest first; equal for candidates between which the policy is free."""
        if self.policy == "pensieve":
            return (self.size(leaf) * (self.clock.now_s - leaf.last_used_s), -leaf.last_used_s)
        if self.policy == "lookahead":
            return self.lookahead_key(leaf)
        return (-leaf.last_used_s,)

    def lookahead_key(self, leaf: Page) -> tuple[float, ...]:
        tails = [None if name is None else self.tail_of(name) for name in self.waiting]
        place = tails.index(leaf) if leaf in tails else None
        return (1, -leaf.last_used_s) if place is None else (0, place)

    def best_key(self, leaves: list[Page]) -> tuple[float, ...]:
        return max(self.key(leaf) for leaf in leaves)


@pytest.mark.hypothesis
@pytest.mark.at_length
@pytest.mark.parametrize("policy", POLICIES)
def test_the_forest_is_what_the_model_says(policy: str) -> None:
    machine = type(f"Forest_{policy}", (ForestMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(100, at_length=200), stateful_step_count=40)
    )
