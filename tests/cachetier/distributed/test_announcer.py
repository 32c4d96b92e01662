"""Nodes that announce to the directory over links that lose and delay, against a dictionary of what they hold."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mneme.cachetier.distributed.announcer import BATCH_CHANGES, MAX_PENDING, SIGN_OF_LIFE_S, Announcer
from mneme.cachetier.distributed.directory import SILENT_S, Announcement, Directory, Place, Reply
from mneme.cachetier.names import TierName
from mneme.cachetier.node.index import Change
from tests.budget import examples
from tests.cachetier.nodes import Clock

KEYS = [bytes([number, *range(14), number % 3]) for number in range(6)]
NODES = ("a", "b", "c")
TIERS: tuple[TierName, ...] = ("host", "disk")

keys_drawn = st.sampled_from(KEYS)
nodes_drawn = st.sampled_from(NODES)
tiers_drawn = st.sampled_from(TIERS)


class Link:
    """Between nodes and the directory: an announcement arrives, late or never; a reply may be lost, too."""

    def __init__(self, clock: Clock) -> None:
        self.directory = Directory(clock)
        self.delayed: list[Announcement] = []
        self.heard: dict[str, int] = {}  # the highest epoch that the directory has heard of a node
        self.fate: Callable[[], str] = lambda: "arrives"

    def send(self, said: Announcement) -> Reply | None:
        fate = self.fate()
        if fate == "lost":
            return None
        if fate == "delayed":
            self.delayed.append(said)
            return None
        reply = self.deliver(said)
        return None if fate == "reply lost" else reply

    def deliver(self, said: Announcement) -> Reply:
        self.heard[said.node] = max(said.epoch, self.heard.get(said.node, 0))
        return self.directory.announce(said)


class NodeModel:
    """What a node holds; the bytes of a chunk say in which life it was put there."""

    def __init__(self, name: str, life: int, link: Link, clock: Clock) -> None:
        self.life = life
        self.held: dict[tuple[bytes, TierName], int] = {}
        self.announcer = Announcer(name, self.snapshot, link.send, epoch=life, clock=clock)

    def snapshot(self) -> list[Change]:
        return [Change(key, tier, num_bytes, True) for (key, tier), num_bytes in self.held.items()]

    def add(self, key: bytes, tier: TierName) -> None:
        self.held[key, tier] = self.life
        self.announcer.changed(Change(key, tier, self.life, True))

    def remove(self, key: bytes, tier: TierName) -> None:
        if self.held.pop((key, tier), None) is not None:
            self.announcer.changed(Change(key, tier, 0, False))


class AnnouncingMachine(RuleBasedStateMachine):
    """Any order of changes, deaths, restarts, losses; in the end the directory knows what each living node holds."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.link = Link(self.clock)
        self.life = 1
        self.nodes: dict[str, NodeModel] = {name: self.born(name) for name in NODES}

    def born(self, name: str) -> NodeModel:
        self.life += 1
        return NodeModel(name, self.life, self.link, self.clock)

    @rule(name=nodes_drawn, key=keys_drawn, tier=tiers_drawn)
    def add(self, name: str, key: bytes, tier: TierName) -> None:
        if name in self.nodes:
            self.nodes[name].add(key, tier)

    @rule(name=nodes_drawn, key=keys_drawn, tier=tiers_drawn)
    def remove(self, name: str, key: bytes, tier: TierName) -> None:
        if name in self.nodes:
            self.nodes[name].remove(key, tier)

    @rule(name=nodes_drawn, seed=st.integers(0, 1000), share_lost=st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    def announce(self, name: str, seed: int, share_lost: float) -> None:
        generator = random.Random(seed)
        fates = ("lost", "delayed", "reply lost")
        self.link.fate = lambda: generator.choice(fates) if generator.random() < share_lost else "arrives"
        if name in self.nodes:
            self.nodes[name].announcer.step()

    @rule(position=st.integers(0, 100))
    def deliver_late(self, position: int) -> None:
        if self.link.delayed:
            self.link.deliver(self.link.delayed.pop(position % len(self.link.delayed)))

    @rule(name=nodes_drawn)
    def die(self, name: str) -> None:
        self.nodes.pop(name, None)

    @rule(name=nodes_drawn)
    def restart(self, name: str) -> None:
        self.nodes[name] = self.born(name)

    @rule()
    def directory_dies(self) -> None:
        self.link.directory = Directory(self.clock)
        self.link.heard.clear()

    @rule(seconds=st.sampled_from([0.1, 1.0, SILENT_S, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @invariant()
    def nothing_of_a_life_is_offered_after_its_successor_was_heard_of(self) -> None:
        for places in self.link.directory.lookup(KEYS):
            for place in places:
                assert place.num_bytes >= self.link.heard[place.node]

    def teardown(self) -> None:
        self.link.fate = lambda: "arrives"
        while self.link.delayed:
            self.link.deliver(self.link.delayed.pop())
        for _ in range(int(SILENT_S / SIGN_OF_LIFE_S) + 4):
            self.clock.now_s += SIGN_OF_LIFE_S
            for node in self.nodes.values():
                node.announcer.step()
        for key in KEYS:
            found = self.link.directory.lookup([key])[0]
            assert set(found) == self.truth(key)
            assert len(found) == len(set(found))

    def truth(self, key: bytes) -> set[Place]:
        places = set()
        for name, node in self.nodes.items():
            tier = next((tier for tier in TIERS if (key, tier) in node.held), None)
            if tier is not None:
                places.add(Place(name, tier, node.life))
        return places


TestAnnouncing = AnnouncingMachine.TestCase
TestAnnouncing.settings = settings(max_examples=examples(150), stateful_step_count=40)


def linked_node(num_keys: int) -> tuple[Link, Clock, NodeModel]:
    clock = Clock()
    link = Link(clock)
    node = NodeModel("a", 7, link, clock)
    for number in range(num_keys):
        node.add(number.to_bytes(2, "little") + bytes(14), "disk")
    return link, clock, node


def num_known(link: Link) -> int:
    return int(link.directory.stats()["num_keys"])


def test_a_whole_account_goes_in_parts_and_one_lost_part_begins_it_anew() -> None:
    link, clock, node = linked_node(5 * BATCH_CHANGES)
    fates = iter(["arrives", "lost"])
    link.fate = lambda: next(fates, "arrives")
    node.announcer.step()
    assert num_known(link) < 5 * BATCH_CHANGES
    clock.now_s += SIGN_OF_LIFE_S
    node.announcer.step()
    assert num_known(link) == 5 * BATCH_CHANGES


def test_a_node_under_a_lower_epoch_takes_a_higher_one() -> None:
    """Its clock was set back, say."""
    link, clock, node = linked_node(10)
    link.deliver(Announcement(node="a", epoch=1000, seq=5, is_first=True, is_last=True))
    for _ in range(3):
        clock.now_s += SIGN_OF_LIFE_S
        node.announcer.step()
    assert num_known(link) == 10


def test_too_many_changes_are_told_as_a_whole() -> None:
    link, clock, node = linked_node(10)
    node.announcer.step()
    link.fate = lambda: "lost"
    clock.now_s += SIGN_OF_LIFE_S
    node.announcer.step()
    for _ in range(MAX_PENDING + 1):
        node.announcer.changed(Change(KEYS[0], "host", 7, True))
    node.held[KEYS[0], "host"] = 7
    link.fate = lambda: "arrives"
    before = link.directory.stats()["counters"]["announcements"]
    clock.now_s += SIGN_OF_LIFE_S
    node.announcer.step()
    assert link.directory.stats()["counters"]["announcements"] - before < 10
    assert link.directory.lookup([KEYS[0]])[0]


def test_a_directory_that_is_silent_costs_one_account_until_it_answers() -> None:
    link, clock, node = linked_node(10)
    num_accounts, whole = 0, node.snapshot

    def snapshot() -> list[Change]:
        nonlocal num_accounts
        num_accounts += 1
        return whole()

    node.announcer.snapshot = snapshot
    link.fate = lambda: "lost"
    for _ in range(200):
        clock.now_s += node.announcer.step()
    assert clock.now_s > 1040
    assert num_accounts <= 1
    link.fate = lambda: "arrives"
    for _ in range(4):
        clock.now_s += node.announcer.step()
    assert num_known(link) == 10


def test_changes_wake_the_thread() -> None:
    began, told = threading.Event(), threading.Event()

    def send(said: Announcement) -> Reply:
        if [change.key for change in said.changes] == [KEYS[0]]:
            told.set()
        if said.is_last:
            began.set()
        return Reply(False, said.epoch)

    announcer = Announcer("a", list, send, epoch=1, clock=Clock())  # of which no sign of life is due
    announcer.start()
    assert began.wait(60)
    announcer.changed(Change(KEYS[0], "host", 1, True))
    assert told.wait(60)
    announcer.stop()
