"""Others' rules serve: who is there is chosen, what is in flight is counted, and each keeps to its description."""

from __future__ import annotations

import random
from array import array

import pytest

from mneme.replicas.report import BLOCK_TOKENS, ReplicaReport
from mneme.router.chooser import ReplicaChooser, Reservation
from mneme.router.policies import POLICIES, Policy, PolicyName
from mneme.router.score import RouterConfig
from mneme.router.token_hashes import block_hashes

REPLICAS = ("a", "b", "c", "d")
A_PROMPT, ANOTHER = [1] * 4 * BLOCK_TOKENS, [2] * 4 * BLOCK_TOKENS


def chooser(policy: PolicyName) -> ReplicaChooser:
    made = ReplicaChooser(RouterConfig(policy=policy))
    made.set_replicas(REPLICAS)
    return made


def choose(
    router: ReplicaChooser, ids: list[int], session: str | None = None, without: tuple[str, ...] = ()
) -> Reservation:
    reservation = router.select_and_reserve(ids, session_id=session, exclude=without)
    assert reservation is not None
    return reservation


def policy_of(router: ReplicaChooser) -> Policy:
    assert router._policy is not None
    return router._policy


@pytest.mark.parametrize("name", POLICIES)
def test_who_is_there_is_chosen_and_what_has_ended_is_not_counted(name: PolicyName) -> None:
    router, rng = chooser(name), random.Random(0)
    held: list[Reservation] = []
    there: tuple[str, ...] = REPLICAS
    for number in range(300):
        if number % 50 == 49:
            there = tuple(rng.sample([*REPLICAS, "e", "f"], rng.randint(1, 5)))
            router.set_replicas(there)
        without = (rng.choice(there),) if len(there) > 1 and rng.random() < 0.3 else ()
        ids = [rng.randrange(3)] * rng.choice([1, BLOCK_TOKENS, 5 * BLOCK_TOKENS])
        chosen = choose(router, ids, rng.choice([None, f"s{number % 7}"]), without)
        assert chosen.replica_id in set(there) - set(without)
        chosen.started(0)
        held.append(chosen)
        if rng.random() < 0.7:
            held.pop(rng.randrange(len(held))).release()
    assert router.decisions["policy"] > 100
    for reservation in held:
        reservation.release()
        reservation.release()
    assert not any(policy_of(router).requests.values())
    assert not policy_of(router).placed


@pytest.mark.parametrize("fails", ["choose", "started", "ended", "set_replicas", "restarted", "stored"])
def test_requests_are_routed_by_a_policy_that_raises(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_args: object, **_options: object) -> None:
        raise RuntimeError(f"{fails} is broken")

    router = chooser("power-of-two")
    monkeypatch.setattr(POLICIES["power-of-two"], fails, broken)
    router.set_replicas(REPLICAS[:3])
    router.forget_prefixes("a")
    for seq in (1, 0):  # a late one, and the snapshot that it waits for
        report = ReplicaReport(
            epoch="e", seq=seq, queue_s=0.0, queued_tokens=0, running=0, waiting=0, context_tokens=0,
            free_page_share=1.0, device=array("Q", [1, 2] if seq == 0 else [3]).tobytes(), is_snapshot=seq == 0,
        )  # fmt: skip
        assert router.take_report("a", report) == (seq == 0)
    assert router._index.matched_blocks([1, 2, 3]) == {"a": 3}
    for number in range(20):
        held = choose(router, A_PROMPT, f"s{number}")
        assert held.replica_id in REPLICAS[:3]
        held.started(0)
        held.release()
    assert router.decisions == {"score" if fails == "choose" else "policy": 20}
    assert all(router.running(replica_id) == 0 for replica_id in REPLICAS)
    assert f"{fails} is broken" in caplog.text


@pytest.mark.parametrize("name", ["hash", "ring"])
def test_sessions_stay_where_their_hash_says(name: PolicyName) -> None:
    router = chooser(name)
    homes = {f"s{n}": choose(router, A_PROMPT, f"s{n}").replica_id for n in range(100)}
    assert set(homes.values()) == set(REPLICAS)
    other = chooser(name)
    assert {session: choose(other, ANOTHER, session).replica_id for session in homes} == homes


@pytest.mark.parametrize("name", ["hash", "ring"])
def test_every_ingress_sends_a_session_to_one_replica(name: PolicyName) -> None:
    """In whatever order it linked the replicas, and after a link was lost for a moment."""
    one, other = chooser(name), chooser(name)
    other.set_replicas(REPLICAS[:2])
    other.set_replicas(REPLICAS[::-1])
    for number in range(50):
        homes = [choose(router, A_PROMPT, f"session {number}").replica_id for router in (one, other)]
        assert homes[0] == homes[1]


def test_a_ring_moves_few_sessions() -> None:
    router = chooser("ring")
    homes = {f"s{n}": choose(router, A_PROMPT, f"s{n}").replica_id for n in range(100)}
    router = chooser("ring")
    router.set_replicas((*REPLICAS, "e"))
    moved = [session for session, home in homes.items() if choose(router, A_PROMPT, session).replica_id != home]
    assert 0 < len(moved) < 50


@pytest.mark.parametrize("name", ["ray", "sglang"])
def test_a_prefix_stays_where_it_was_sent_until_that_replica_is_gone(name: PolicyName) -> None:
    router = chooser(name)
    home = choose(router, A_PROMPT).replica_id
    assert {choose(router, [*A_PROMPT, *ANOTHER[:n]]).replica_id for n in range(20)} == {home}
    router.set_replicas([each for each in REPLICAS if each != home])
    assert choose(router, A_PROMPT).replica_id != home


@pytest.mark.parametrize("name", ["power-of-two", "round-robin"])
def test_load_is_spread(name: PolicyName) -> None:
    router = chooser(name)
    for _ in range(40):
        choose(router, A_PROMPT)
    counts = [router.running(replica) for replica in REPLICAS]
    assert max(counts) - min(counts) <= (0 if name == "round-robin" else 4)


@pytest.mark.parametrize("name", ["llm-d", "dynamo"])
def test_what_replicas_report_is_known(name: PolicyName) -> None:
    router = chooser(name)
    blocks = array("Q", block_hashes(A_PROMPT)).tobytes()
    nothing = {
        "queue_s": 0.0,
        "queued_tokens": 0,
        "running": 0,
        "waiting": 0,
        "context_tokens": 0,
        "free_page_share": 1,
    }

    def report(seq: int, **more: bytes) -> ReplicaReport:
        return ReplicaReport(epoch="1", seq=seq, is_snapshot=seq == 0, cost=None, **nothing, **more)  # type: ignore[arg-type]

    router.take_report("c", report(0, device=blocks))
    for _ in range(3):
        reservation = choose(router, A_PROMPT)
        assert reservation.replica_id == "c"
        reservation.release()
    router.take_report("c", report(1, gone=blocks))
    homes = set()
    for _ in range(60):
        reservation = choose(router, A_PROMPT)
        homes.add(reservation.replica_id)
        reservation.release()
    assert homes == set(REPLICAS)
