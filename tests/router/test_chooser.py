"""Where requests go: bounded load, little movement, the same choice everywhere, no herd."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.replicas.report import ReplicaReport
from mneme.router.chooser import ReplicaChooser, Reservation
from mneme.router.score import (
    UNKNOWN,
    Asked,
    Loads,
    RouterConfig,
    RoutingPolicy,
    load_bound,
    prices,
    rendezvous,
    replica_hashes,
)
from tests.budget import examples

REPLICAS = [f"replica-{i}" for i in range(8)]
CONFIG = RouterConfig()
SESSIONS = [f"session-{i}" for i in range(400)]


def chooser(*replicas: str, config: RouterConfig = CONFIG) -> ReplicaChooser:
    made = ReplicaChooser(config)
    made.set_replicas(replicas)
    return made


def choose(
    router: ReplicaChooser, tokens: list[int], session: str | None = None, affinity: str | None = None
) -> Reservation:
    reservation = router.select_and_reserve(tokens, session_id=session, affinity=affinity)
    assert reservation is not None
    return reservation


def preferred(key: str, replicas: list[str]) -> str:
    return replicas[int(rendezvous(key, replica_hashes(replicas)).argmax())]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_some_replica_is_always_eligible(loads: list[int]) -> None:
    assert min(loads) + 1 <= load_bound(sum(loads), len(loads))


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 8))
def test_no_replica_ever_exceeds_the_bound(seed: int, num_replicas: int) -> None:
    rng = random.Random(seed)
    router = chooser(*REPLICAS[:num_replicas])
    held: list[Reservation] = []
    for i in range(200):
        if held and rng.random() < 0.4:
            held.pop(rng.randrange(len(held))).release()
            continue
        total = sum(router.running(r) for r in REPLICAS)
        session = rng.choice([f"session-{i}", None])  # with one prompt: all the traffic wants one replica
        reservation = choose(router, [1] * 500, session)
        held.append(reservation)
        assert router.running(reservation.replica_id) <= load_bound(total, num_replicas)
    for reservation in held:
        reservation.release()
        reservation.release()
    assert all(router.running(r) == 0 for r in REPLICAS)


def test_a_replica_that_comes_or_goes_moves_only_its_own_sessions() -> None:
    before = {s: preferred(s, REPLICAS) for s in SESSIONS}
    without = {s: preferred(s, REPLICAS[1:]) for s in SESSIONS}
    assert all(without[s] == before[s] for s in SESSIONS if before[s] != REPLICAS[0])
    shares = Counter(before.values())
    assert max(shares.values()) < 2 * len(SESSIONS) / len(REPLICAS)


def test_two_ingresses_send_a_new_session_to_the_same_home() -> None:
    for session in SESSIONS[:50]:
        first, second = chooser(*REPLICAS), chooser(*REPLICAS[::-1])
        assert choose(first, [1], session).replica_id == choose(second, [1], session).replica_id


def test_a_session_stays_until_its_replica_is_too_busy() -> None:
    router = chooser("a", "b")
    home = choose(router, list(range(1000)), "s")
    home.release()
    for turn in range(5):
        again = choose(router, list(range(1000 + turn)), "s")
        assert again.replica_id == home.replica_id
        assert again.matched_tokens == 960
        again.release()
    other = ({"a", "b"} - {home.replica_id}).pop()
    for _ in range(40):
        router.select_and_reserve(list(range(1000)), exclude=[other])
    assert choose(router, list(range(1000)), "s").replica_id == other


def test_a_session_that_is_answering_keeps_its_replica() -> None:
    router = chooser(*REPLICAS)
    answering = choose(router, list(range(1000)), "s")
    for length in (1, 5000):  # neither load nor a longer prompt moves what comes behind it
        for other in range(40):
            choose(router, [other] * 200)
        queued = choose(router, list(range(length)), "s")
        assert queued.replica_id == answering.replica_id
    answering.release()
    answering.release()  # counted once
    assert choose(router, [1], "s").replica_id == answering.replica_id  # `queued` is in flight


def test_a_session_is_free_again_when_its_last_turn_is_released() -> None:
    router = chooser("a", "b")
    turns = [choose(router, [1] * 640, "s") for _ in range(3)]
    (home,) = {turn.replica_id for turn in turns}
    for turn in turns:
        turn.release()
    other = ({"a", "b"} - {home}).pop()
    for i in range(10):
        assert router.select_and_reserve([i] * 640, exclude=[other]) is not None
    assert choose(router, [1], "s").replica_id == other


def test_sessions_of_two_tenants_are_two_sessions() -> None:
    router = chooser("a", "b")
    first = router.select_and_reserve([1] * 6400, salt="x", session_id="s")
    second = router.select_and_reserve([1] * 6400, salt="y", session_id="s")
    assert first is not None
    assert second is not None
    assert first.replica_id != second.replica_id


def test_a_session_leaves_a_replica_that_is_excluded_or_gone() -> None:
    router = chooser("a", "b")
    answering = choose(router, [1], "s").replica_id
    other = ({"a", "b"} - {answering}).pop()
    elsewhere = router.select_and_reserve([1], session_id="s", exclude=[answering])
    assert elsewhere is not None
    assert elsewhere.replica_id == other
    assert choose(router, [1], "s").replica_id == other  # behind the latest turn
    router.set_replicas([answering])
    router.set_replicas(["a", "b"])  # a new life: nothing of the session is in flight there
    assert choose(router, [1], "s").replica_id == answering


def test_a_shared_prefix_draws_requests_without_a_session() -> None:
    router = chooser(*REPLICAS)
    system_prompt = list(range(2048))
    first = choose(router, system_prompt)
    first.started()
    assert choose(router, [*system_prompt, 7, 8, 9]).replica_id == first.replica_id
    assert choose(router, [*system_prompt[:-100], 7]).matched_tokens == 1920


def test_a_burst_does_not_herd() -> None:
    router = chooser(*REPLICAS)
    burst = [choose(router, [i] * 300) for i in range(80)]  # nothing finishes in between
    assert set(Counter(r.replica_id for r in burst).values()) == {10}


def test_long_prompts_count_for_more_than_their_number() -> None:
    router = chooser("a", "b")
    long = choose(router, [1] * 10_000)
    short = [choose(router, [i] * 200) for i in range(2, 5)]
    assert {r.replica_id for r in short} == {"a", "b"} - {long.replica_id}
    long.started()  # its prompt is computed: only its decode counts now
    assert choose(router, [9] * 200).replica_id == long.replica_id


def test_a_dead_replica_is_not_chosen_and_takes_its_load_along() -> None:
    router = chooser("a", "b")
    reservation = choose(router, list(range(640)))
    dead = reservation.replica_id
    alive = ({"a", "b"} - {dead}).pop()
    router.set_replicas([alive])
    assert choose(router, list(range(640))).replica_id == alive
    router.set_replicas(["a", "b"])
    reservation.release()  # of its former life
    assert router.running(dead) == 0
    again = router.select_and_reserve(list(range(640)), exclude=[alive])
    assert again is not None
    assert again.matched_tokens == 0


def test_no_candidate_gives_none() -> None:
    assert chooser().select_and_reserve([1]) is None
    assert chooser("a").select_and_reserve([1], exclude=["a"]) is None


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 30))
def test_the_price_grows_with_work_and_away_from_home(uncached: int, queued: int, running: int) -> None:
    def total(*, more: str = "", is_away: bool = False) -> float:
        loads = Loads(
            UNKNOWN[None],
            UNKNOWN[None],
            np.array([(queued + (more == "queued")) / 1e4]),
            np.array([running + (more == "running")], float),
            np.zeros(1),
            np.zeros(1),
        )
        matched = np.array([5001.0 - uncached - (more == "uncached")])
        asked = Asked(5002, matched, *np.zeros((4, 1)), np.array([is_away]))
        return float(prices(loads, asked).total[0])

    assert total() >= 0
    for more in ("uncached", "queued", "running"):
        assert total(more=more) > total()
    assert total(is_away=True) > total()


def test_one_new_prompt_goes_to_one_replica_through_every_ingress() -> None:
    homes = set()
    for num_before in range(4):
        router = chooser(*REPLICAS)
        for _ in range(num_before):
            choose(router, [1]).release()  # ingresses have not made the same choices until then
        homes.add(choose(router, list(range(1024))).replica_id)
    assert len(homes) == 1


def test_requests_with_one_hint_go_to_one_replica_in_every_ingress() -> None:
    for hint in ("app", "other", "third"):
        homes = set()
        for router in (chooser(*REPLICAS), chooser(*reversed(REPLICAS))):
            for i in range(10):
                reservation = choose(router, [i] * 40, affinity=hint)  # they have nothing else in common
                homes.add(reservation.replica_id)
                reservation.release()
        assert len(homes) == 1


@settings(max_examples=examples(20))
@given(st.integers(2, 8), st.integers(0, 2000))
def test_one_hint_does_not_herd(num_replicas: int, num_shared: int) -> None:
    router = chooser(*REPLICAS[:num_replicas])
    for i in range(64):
        choose(router, [1] * num_shared + [1000 + i] * 100, affinity="app")
        busiest = max(router.running(r) for r in REPLICAS)
        assert busiest <= load_bound(i, num_replicas)
    assert all(router.running(r) > 0 for r in REPLICAS[:num_replicas])


def test_a_hint_follows_the_kv_that_load_has_moved() -> None:
    router = chooser("a", "b")
    held = [choose(router, [7] * 64, affinity="app")]
    while held[-1].replica_id == held[0].replica_id:
        history = [len(held)] * 512
        held.append(choose(router, history, affinity="app"))
    for reservation in held:
        reservation.release()
    assert choose(router, [8] * 64, affinity="app").replica_id == held[0].replica_id
    assert choose(router, [*history, 9, 9], affinity="app").replica_id == held[-1].replica_id


@pytest.mark.parametrize("policy", ["random", "least-loaded", "hash"])
def test_by_a_rule_who_is_there_is_chosen(policy: RoutingPolicy) -> None:
    router, rng = chooser(*REPLICAS, config=RouterConfig(policy=policy)), random.Random(0)
    held: list[Reservation] = []
    there = list(REPLICAS)
    for number in range(300):
        there = rng.sample(REPLICAS, rng.randint(2, 8)) if number % 50 == 49 else there
        router.set_replicas(there)
        without = rng.choice(there)
        chosen = router.select_and_reserve([1] * 640, session_id=f"s{number}", exclude=(without,))
        assert chosen is not None
        assert chosen.replica_id in set(there) - {without}
        held.append(chosen)
        if rng.random() < 0.7:
            held.pop(rng.randrange(len(held))).release()
    assert router.decisions == {"policy": 300}


def test_the_rules_spread_load_or_keep_sessions() -> None:
    def homes(policy: RoutingPolicy, session: str | None, replicas: list[str] = REPLICAS) -> Counter[str]:
        router = ReplicaChooser(RouterConfig(policy=policy), rng=random.Random(1))
        router.set_replicas(replicas)
        return Counter(choose(router, [1] * 640, session).replica_id for _ in range(80))

    assert set(homes("least-loaded", None).values()) == {10}
    assert len(homes("random", None)) == len(homes("hash", None)) == 8  # though all have one prompt
    # In every ingress the same, in whatever order it linked the replicas.
    assert [*homes("hash", "s1")] == [*homes("hash", "s1", REPLICAS[::-1])] == [preferred("ss1", REPLICAS)]


def test_the_least_loaded_is_so_by_what_others_sent_too() -> None:
    router = chooser("a", "b", config=RouterConfig(policy="least-loaded"))
    report = ReplicaReport(
        epoch="e", seq=0, backlog_s=0.0, queued_tokens=0, running=2, waiting=1, context_tokens=0, free_page_share=1.0,
        is_snapshot=True,
    )  # fmt: skip
    router.apply_report("a", report)
    assert [choose(router, [1]).replica_id for _ in range(3)] == ["b"] * 3
