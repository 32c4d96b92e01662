"""The chooser follows what replicas report: what is there, what it costs; nothing that is lost, late or nonsense."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.cachetier.policy.cost_model import CostModel
from mneme.replicas.report import ReplicaReport, pack
from mneme.router.chooser import SILENT_S, ReplicaChooser, Reservation
from mneme.router.prefix_index import SENT_S, PrefixIndex
from mneme.router.score import RouterConfig
from mneme.router.token_hashes import block_hashes
from tests.budget import examples

COST = {
    "prefill": [0.0, 1e-4, 0.0],
    "decode": [0.01, 1e-4, 0.0],
    "edges": {"host": [1e-3, 0.0, 1e-9], "peer_host": [1e-2, 0.0, 1e-8]},
    "step_rows": 512,
    "kv_bytes_per_token": 1000,
    "scales": {},
}
PROMPT = list(range(1024))


def cost(**changes: Any) -> tuple[float, ...]:
    """What a replica with this cost model reports."""
    return CostModel.from_mapping({**COST, **changes}).figures()


BLOCKS = block_hashes(PROMPT)


def report(seq: int = 0, *, epoch: str = "one", **values: Any) -> ReplicaReport:
    """An idle replica's, unless it is said otherwise."""
    blocks = {name: pack(h.to_bytes(8, "little") for h in values.pop(name, ())) for name in ("device", "host", "gone")}
    idle = {
        "backlog_s": 0.0,
        "queued_tokens": 0,
        "running": 0,
        "waiting": 0,
        "context_tokens": 0,
        "free_page_share": 1.0,
    }
    return ReplicaReport(epoch=epoch, seq=seq, **{**idle, **values}, **blocks)


class Played:
    """A chooser with a clock that is set."""

    def __init__(self, *replicas: str) -> None:
        self.now_s, self._replicas = 100.0, replicas
        self.chooser = ReplicaChooser(RouterConfig(), lambda: self.now_s)
        self.chooser.set_replicas(replicas)
        for replica in replicas:
            self.take(replica, report(is_snapshot=True, cost=cost()))

    def take(self, replica: str, said: ReplicaReport) -> bool:
        return self.chooser.apply_report(replica, said)

    def choose(self, tokens: Sequence[int] = PROMPT, **options: Any) -> Reservation:
        reservation = self.chooser.select_and_reserve(tokens, **options)
        assert reservation is not None
        return reservation

    def held(self, replica: str, tokens: Sequence[int] = PROMPT) -> int:
        """Tokens that the replica is thought to have of a prompt; leaves no trace but for a speculative one."""
        others = [each for each in self._replicas if each != replica]
        reservation = self.choose(tokens, exclude=others)
        reservation.release()
        return reservation.matched_tokens


def test_requests_go_where_the_kv_is_and_not_where_it_was() -> None:
    played = Played("a", "b", "c")
    played.take("b", report(1, device=BLOCKS))
    assert played.choose().replica_id == "b"
    played.now_s += 3 * SENT_S  # what was sent there has not been confirmed for long
    played.take("b", report(2, gone=BLOCKS[8:]))
    assert played.choose().matched_tokens == 512
    played.now_s += 3 * SENT_S
    played.take("b", report(3, gone=BLOCKS[:8]))
    assert not played.take("b", report(5, device=BLOCKS))  # behind one that is lost, or late
    assert played.choose().matched_tokens == 0


def test_what_was_sent_counts_until_it_is_confirmed_or_too_old() -> None:
    played = Played("a")
    played.choose().release()
    assert played.held("a") == 1024
    played.now_s += 3 * SENT_S
    assert played.held("a", PROMPT[:640]) == 0
    played.take("a", report(1, device=BLOCKS))
    played.now_s += 100 * SENT_S
    assert played.held("a") == 1024


@pytest.mark.parametrize("has_choices", [True, False])
def test_what_waits_in_a_long_queue_is_not_forgotten(has_choices: bool) -> None:
    played = Played("a")
    waiting = played.choose()
    for number in range(1, 21):
        played.now_s += SENT_S / 2
        if has_choices:
            played.choose([9] * 100).release()
        else:
            played.take("a", report(number, backlog_s=100.0, waiting=1))
    assert played.choose().matched_tokens == 1024
    waiting.release()


def test_what_of_the_tier_is_on_a_node_that_is_gone_is_forgotten() -> None:
    played = Played("a", "b")
    played.take("a", report(1, node="old", device=BLOCKS))
    played.take("b", report(1, node="new"))

    def at_peers() -> float:
        played.now_s += 3 * SENT_S  # what was sent there is forgotten
        reservation = played.choose(exclude=["a"])
        reservation.release()
        return float(reservation.route.asked.at_peers[0])

    assert at_peers() == 1024
    played.chooser.set_replicas(["b"])  # its link may be lost for a while
    assert at_peers() == 1024
    for number in range(2, 20):
        played.now_s += 60
        played.take("b", report(number, node="new"))
        played.chooser.set_replicas(["b"])
    assert at_peers() == 0


def test_a_prompt_is_held_while_a_replica_has_half_of_it() -> None:
    played = Played("a")
    assert not played.chooser.is_held(PROMPT)
    played.take("a", report(1, device=BLOCKS[:8]))
    assert played.chooser.is_held(PROMPT)
    assert not played.chooser.is_held(PROMPT, salt="another tenant")
    played.take("a", report(2, gone=BLOCKS[7:8]))  # deleted
    assert not played.chooser.is_held(PROMPT)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_restarted_replica_leaves_no_ghosts(is_told: bool) -> None:
    played = Played("a", "b")
    played.take("a", report(1, device=BLOCKS))
    if is_told:
        played.chooser.forget_prefixes("a")
    assert not played.take("a", report(0, epoch="two"))
    assert played.take("a", report(0, epoch="two", is_snapshot=True))
    assert played.take("a", report(2, device=BLOCKS))  # on its way since before
    assert played.held("a") == 0


def test_host_tiers_and_nodes_caches_count_as_loads_where_that_is_sooner() -> None:
    played = Played("a", "b", "c")
    played.take("a", report(1, node="x", device=BLOCKS))
    played.take("b", report(1, node="x"))
    played.take("c", report(1, node="y"))
    busy = {"backlog_s": 5.0, "running": 3, "waiting": 1, "context_tokens": 3000}
    played.take("a", report(2, node="x", **busy))
    chosen = played.choose()
    assert chosen.replica_id == "b"  # its node has what `a` computed
    tokens = {each["replica"]: each["tokens"] for each in chosen.route.as_json()["candidates"]}
    assert [tokens[r]["in_node"] for r in "abc"] == [0, 1024, 0]
    assert tokens["c"]["at_peers"] == 1024
    assert chosen.route.elsewhere_tokens == 1024
    terms = {each["replica"]: each["ms"] for each in chosen.route.as_json()["candidates"]}
    assert terms["b"]["load"] < terms["c"]["load"] < 102.4
    assert terms["a"]["queue"] == 5000
    chosen.started(0)  # the tier had lost it
    chosen.release()
    played.now_s += 3 * SENT_S
    assert played.held("c") == 0


def test_what_nodes_have_on_disk_is_priced_as_that() -> None:
    taking_s = {"host": 0.0, "disk": 0.04, "peer_host": 0.01, "peer_disk": 0.09}
    edges = {edge: [seconds, 0.0, 0.0] for edge, seconds in taking_s.items()}
    played = Played("a", "b", "c")
    shares = {"host": 0.5, "peer_host": 0.25}
    for name, node in (("a", "x"), ("b", "x"), ("c", "y")):
        device = BLOCKS if name == "a" else ()
        played.take(name, report(1, node=node, device=device, cost=cost(edges=edges, disk_shares=shares)))
    terms = {each["replica"]: each["ms"] for each in played.choose().route.as_json()["candidates"]}
    computed_ms = 0.1  # of the last token, beside which it is brought
    assert terms["b"]["load"] == pytest.approx(20 - computed_ms)
    assert terms["c"]["load"] == pytest.approx(30 - computed_ms)


def test_documents_are_scored() -> None:
    played = Played("a", "b")
    document = [7] * 640
    played.take("b", report(1, device=block_hashes(document)))
    chosen = played.choose([*range(64), *document, *range(64)], documents=[document])
    assert (chosen.replica_id, chosen.matched_tokens) == ("b", 640)


def test_a_session_whose_kv_no_report_has_stays_where_that_is() -> None:
    for is_private in (True, False):
        played = Played("a", "b")
        first = played.choose(session_id="s")
        other = ({"a", "b"} - {first.replica_id}).pop()
        first.started(0, is_private=is_private)
        first.release()
        played.now_s += 3 * SENT_S
        played.take(first.replica_id, report(1, backlog_s=0.05))
        assert (played.choose(session_id="s").replica_id == first.replica_id) == is_private
        elsewhere = played.choose(session_id="t", exclude=[first.replica_id])
        assert (elsewhere.replica_id, elsewhere.matched_tokens > 0) == (other, not is_private)


def test_a_burst_is_computed_once_where_that_is_sooner() -> None:
    played = Played("a", "b")
    burst = [played.choose() for _ in range(6)]
    assert len({each.replica_id for each in burst}) == 1
    assert sum(len(PROMPT) - each.matched_tokens for each in burst) < 1.2 * (len(PROMPT) - burst[0].matched_tokens)


def test_a_burst_is_spread_where_the_first_waits_long() -> None:
    played = Played("a", "b")
    first = played.choose()
    other = ({"a", "b"} - {first.replica_id}).pop()
    assert played.choose().replica_id == first.replica_id
    played.take(first.replica_id, report(1, backlog_s=9.0, running=2, waiting=9))  # others came before it
    assert played.choose().replica_id == other


def test_a_load_counts_what_was_reserved_since_it_was_said() -> None:
    played = Played("a", "b")
    first = played.choose([1] * 4096)
    busy, idle = first.replica_id, ({"a", "b"} - {first.replica_id}).pop()
    first.admitted()
    assert played.choose([2] * 100).replica_id == idle
    played.now_s += 1.0
    played.take(busy, report(1, backlog_s=0.0))  # it is computed already
    assert played.choose([3] * 10_000).replica_id == busy


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf, -math.inf])
def test_nonsense_in_a_report_counts_as_not_said(bad: float) -> None:
    played = Played("a", "b")
    for seq, wrong in enumerate(
        (
            {"backlog_s": bad, "queued_tokens": 100_000},
            {"backlog_s": bad, "queued_tokens": -5, "running": -3, "context_tokens": -7, "free_page_share": bad},
            {"cost": (bad, bad, bad, *cost()[3:])},
            {"cost": (*cost()[:-1], bad)},
            {"cost": ()},
        ),
        1,
    ):
        assert played.take("a", report(seq, **wrong))
        chosen = played.choose([seq] * 500)
        terms = [value for each in chosen.route.as_json()["candidates"] for value in each["ms"].values()]
        assert all(0 <= value < math.inf for value in terms)
        if seq == 1:
            assert chosen.replica_id == "b"
        chosen.release()
    assert played.chooser.decisions.keys() == {"score"}


def test_a_clock_that_jumps_harms_nothing() -> None:
    played = Played("a", "b")
    rng = random.Random(0)
    held: list[Reservation] = []
    for seq in range(1, 60):
        played.now_s = rng.choice([-1e9, 0.0, 5.0, 1e6, 1e12])
        played.take("a", report(seq, backlog_s=rng.random()))
        held.append(played.choose([seq] * 300, session_id=f"s{seq % 5}"))
        if len(held) > 4:
            held[-5].started(0)
    for each in held:
        each.release()
    assert played.chooser.running("a") == played.chooser.running("b") == 0
    last = played.choose(session_id="s1")
    assert last.route.reason == "score"
    assert last.route.prices is not None
    assert all(math.isfinite(each) and each >= 0 for each in last.route.prices.total)


def test_when_all_are_silent_sessions_go_home_and_others_to_the_less_busy_of_two() -> None:
    played = Played("a", "b", "c")
    for replica in "abc":
        played.choose(exclude=[each for each in "abc" if each != replica])
    homes = {s: Played("a", "b", "c").choose([1], session_id=s).replica_id for s in "stuv"}
    played.now_s += 2 * SILENT_S
    before = played.chooser.decisions.copy()
    assert {s: played.choose([1], session_id=s).replica_id for s in "stuv"} == homes
    played.choose([2])
    assert played.chooser.decisions - before == {"ring": 4, "p2c": 1}


def test_prices_that_cannot_be_made_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played("a", "b")

    def broken(*_args: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(PrefixIndex, "match", broken)
    assert {played.choose([number]).replica_id for number in range(20)} == {"a", "b"}
    assert played.choose([2**70]).replica_id in {"a", "b"}  # no id of any vocabulary
    played.take("a", replace(report(1), device=7))  # type: ignore[arg-type]


def test_what_was_predicted_is_compared_with_what_came() -> None:
    played = Played("a")
    played.take("a", report(1, device=BLOCKS[:8]))
    chosen = played.choose()
    assert chosen.route.ttft_s == pytest.approx(512e-4)
    played.now_s += 0.1
    chosen.started(256)
    accuracy = played.chooser.accuracy
    assert accuracy["actual_s"] == pytest.approx(0.1)
    assert accuracy["predicted_s"] == pytest.approx(512e-4)
    assert (accuracy["predicted_tokens"], accuracy["found_tokens"]) == (512, 256)
    assert (accuracy["missing_tokens"], accuracy["surplus_tokens"]) == (256, 0)


def test_what_first_tokens_take_beyond_their_price_is_learned_and_not_weighed() -> None:
    played = Played("a", "b")
    home = ""
    for number, late_s in enumerate([0.03, 0.03, 5.0, 0.03]):  # one of them waited for something else
        chosen = played.choose([number] * 512, affinity="app")
        assert chosen.replica_id == (home or chosen.replica_id)
        assert chosen.route.ttft_s == pytest.approx(512e-4 + (0.03 if number else 0.0))
        home = chosen.replica_id
        played.now_s += 512e-4 + late_s
        chosen.started(0)
        chosen.release()
    assert played.chooser.accuracy["later"] == 2  # the first and the third
    terms = played.choose(affinity="app").route.as_json()["candidates"]
    assert {each["replica"]: each["ms"]["overhead"] for each in terms} == {home: 30.0, ({"a", "b"} - {home}).pop(): 0.0}


def test_what_loads_take_beyond_their_price_is_learned_of_all_replicas_and_forgotten() -> None:
    played = Played("a", "b")
    prompts = [[number] * 1024 for number in range(5)]
    played.take("a", report(1, node="x", device=[block for prompt in prompts for block in block_hashes(prompt)]))
    played.take("b", report(1, node="x"))
    for prompt, late_s in zip(prompts, (0.3, 9.0, 0.3), strict=False):
        chosen = played.choose(prompt, exclude=["a"])
        terms = chosen.route.as_json()["candidates"][0]["ms"]
        played.now_s += (terms["ttft"] - terms["late_load"]) / 1e3 + late_s
        chosen.started(1000)
        chosen.release()
    terms = {each["replica"]: each["ms"] for each in played.choose(prompts[3]).route.as_json()["candidates"]}
    assert (terms["a"]["late_load"], terms["b"]["late_load"]) == (0.0, 300.0)
    assert (terms["a"]["overhead"], terms["b"]["overhead"]) == (0.0, 0.0)
    played.now_s += 61
    terms = {each["replica"]: each["ms"] for each in played.choose(prompts[4]).route.as_json()["candidates"]}
    assert terms["b"]["load"] < terms["b"]["ttft"] == pytest.approx(terms["b"]["load"] + terms["b"]["compute"])


def test_a_bad_moment_of_one_replica_does_not_take_its_work_away() -> None:
    """Its steps took three times as long beside others': with nothing to do it could never learn better."""
    played = Played("a", "b", "c")
    played.take("b", report(1, cost=cost(scales={"prefill": 3.0, "decode": 2.0})))
    chosen = [played.choose([number] * 512).replica_id for number in range(30)]
    assert min(chosen.count(replica) for replica in "abc") >= 8
    played.take("a", report(1, cost=cost(scales={"prefill": 2.0})))
    candidates = played.choose([31] * 512).route.as_json()["candidates"]
    assert [each["ms"]["compute"] for each in candidates] == [102.4] * 3  # the median of all three


class Replica:
    """Says what comes and goes, in numbered reports; anew after a restart."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.life, self.there = rng, 0, set[int]()
        self.seq = -1

    def change(self) -> ReplicaReport:
        if self.rng.random() < 0.05:
            self.life, self.seq, self.there = self.life + 1, -1, set()
        came = {h for h in BLOCKS if self.rng.random() < 0.2} - self.there
        gone = {h for h in self.there if self.rng.random() < 0.2}
        self.there = (self.there | came) - gone
        self.seq += 1
        return report(self.seq, epoch=f"life-{self.life}", device=came, gone=gone)

    def snapshot(self) -> ReplicaReport:
        return report(self.seq, epoch=f"life-{self.life}", device=self.there, is_snapshot=True)


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32), st.floats(0, 0.3), st.floats(0, 0.5))
def test_ingresses_converge_under_loss_gaps_and_disorder(seed: int, loss: float, disorder: float) -> None:
    rng = random.Random(seed)
    replica = Replica(rng)
    ingresses = [ReplicaChooser(RouterConfig(), lambda: 0.0) for _ in range(2)]
    wants = [True, True]
    on_the_way: list[list[ReplicaReport]] = [[], []]
    for ingress in ingresses:
        ingress.set_replicas(["r"])
    for step in range(60):
        said = replica.change()
        for index, ingress in enumerate(ingresses):
            way = on_the_way[index]
            way[:] = [each for each in way if each.epoch == said.epoch]  # a stream ends with its process
            if rng.random() >= loss or step == 59:
                way.append(said)
            if wants[index] or step == 59:
                way.append(replica.snapshot())
            if rng.random() < disorder and step < 59:
                rng.shuffle(way)
                continue  # they come later
            for each in way:
                wants[index] = not ingress.apply_report("r", each)
            way.clear()
    for index, ingress in enumerate(ingresses):
        if wants[index]:
            assert ingress.apply_report("r", replica.snapshot())
    expected = 0
    while expected < len(BLOCKS) and BLOCKS[expected] in replica.there:
        expected += 1
    for ingress in ingresses:
        reservation = ingress.select_and_reserve(PROMPT)
        assert reservation is not None
        assert reservation.matched_tokens == 64 * expected


@settings(max_examples=examples(30))
@given(st.integers(0, 2**32))
def test_an_index_that_replicas_come_to_and_go_from_says_what_a_plain_one_would(seed: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(10_000)
    plain: dict[str, dict[int, str]] = {}
    chains = [[rng.getrandbits(64) for _ in range(rng.randrange(1, 12))] for _ in range(10)]
    for now_s in range(300):
        name, chain = f"r{rng.randrange(6)}", rng.choice(chains)
        if rng.random() < 0.1:
            index.forget(name)
            plain.pop(name, None)
        else:
            tier = rng.choice(["device", "host", "gone"])
            index.update(name, **{tier: chain})
            known = plain.setdefault(name, {})
            known.update(dict.fromkeys(chain, tier))
        asked = rng.choice(chains)
        found = index.match(asked, float(now_s) * SENT_S)
        for replica, known in plain.items():
            tiers = [known.get(block, "gone") for block in asked]
            depth = (*tiers, "gone").index("gone")
            assert found.blocks.get(replica, 0) == depth
            assert found.host_blocks.get(replica, 0) == tiers[:depth].count("host")
        assert found.blocks.keys() <= plain.keys()
