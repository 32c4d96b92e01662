"""The simulated cluster: one replica by hand, conservation, determinism, and what known rules do in known cases."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from mneme.cachetier.policy.cost_model import Calibration, CostModel
from mneme.lab.cache.costs import Rates, stands_still
from mneme.lab.cache.synthetic import SyntheticShape, make_trace
from mneme.lab.cache.traces import PacedRequest, TraceRequest
from mneme.lab.cluster.routers import ROUTERS
from mneme.lab.cluster.scenarios import SCENARIOS
from mneme.lab.cluster.simulated_replica import DEFAULT_RATES, EngineShape, Replica
from mneme.lab.cluster.simulation import ClusterShape, Simulation
from mneme.lab.cluster.workload import Turn, infinite_hit_ratio, scaled, turns_of
from mneme.router.autoscaler import AutoscaleConfig
from tests.budget import rarer
from tests.lab.trace_cases import BLOCK_TOKENS, random_trace

# A second for ten tokens of a prompt, and for each token of any batch.
COSTS = CostModel(
    Calibration(prefill=(0, 0.1, 0), decode=(1.0, 0, 0), step_rows=1000, kv_bytes_per_token=1), stands_still
)
ONE = ClusterShape(replicas=1, engine=EngineShape(max_step_s=1.0))


TIMES = ("took_s", "simulated_requests_per_minute")  # of this machine


def turn(at_s: float, block_ids: list[int], output_tokens: int = 1) -> Turn:
    session = block_ids[0]
    return Turn(at_s, block_ids, len(block_ids) * BLOCK_TOKENS, output_tokens, BLOCK_TOKENS, session)


def found_turns(trace: Sequence[TraceRequest]) -> list[Turn]:
    return turns_of(PacedRequest(*asked) for asked in trace)


@cache
def played(scenario: str, router: str, num_turns: int | None = None) -> dict[str, Any]:
    """Play a scenario once for all tests; `num_turns`: only its first turns, where these are enough."""
    shape, turns = SCENARIOS[scenario].make(0)
    return Simulation(replace(shape, router=router), turns[:num_turns], DEFAULT_RATES.cost_model()).run()


def test_one_request_takes_its_prefill_and_its_steps() -> None:
    figures = Simulation(ONE, [turn(0.0, [1, 2, 3, 4, 5], output_tokens=4)], COSTS).run()
    assert figures["ttft_p50_s"] == pytest.approx(2.0)  # 20 tokens
    assert figures["e2e_p50_s"] == pytest.approx(2.0 + 3 * 1.0)
    assert figures["itl_p50_s"] == pytest.approx(1.0)
    assert figures["load_skew"] == figures["busy_share"] == 1.0


def test_a_step_takes_what_the_engine_would_let_it_by_default() -> None:
    stream, prompt = turn(0.0, [1], output_tokens=100), turn(10.0, list(range(11, 11 + 112)))
    simulation = Simulation(ClusterShape(replicas=1), [stream, prompt], COSTS)
    simulation.run()
    done = {job.turn.session: job for job in simulation.done}
    # 448 tokens in seven steps, each of seven times what a decode takes beside it.
    assert done[11].first_s == pytest.approx(10.4 + 44.8)
    assert done[1].ended_s == pytest.approx(55.2 + 99 - 10 - 7)


def test_what_was_computed_is_found_and_not_computed_again() -> None:
    turns = [turn(0.0, [1, 2, 3, 4]), turn(100.0, [1, 2, 3, 5])]
    simulation = Simulation(ONE, turns, COSTS)
    figures = simulation.run()
    assert figures["hit_ratio"] == figures["infinite_hit_ratio"] == 3 / 8
    assert [job.first_s - job.due_s for job in simulation.done] == pytest.approx([1.6, 0.4])


def test_a_prompt_waits_for_room_and_for_a_stream() -> None:
    few = replace(ONE, engine=EngineShape(max_step_s=1.0, max_running=1))
    small = replace(ONE, engine=EngineShape(max_step_s=1.0, capacity_tokens=20))
    for shape in (few, small):
        simulation = Simulation(shape, [turn(0.0, [1, 2, 3], output_tokens=11), turn(0.0, [7, 8, 9])], COSTS)
        simulation.run()
        assert [job.first_s for job in simulation.done if job.turn.session == 7] == pytest.approx([1.2 + 10 + 1.2])


def test_what_has_left_the_device_is_known_to_be_below_it() -> None:
    """Prompts come again, from other sessions, once no device has them: to whoever has them in its host tier."""
    prompts = [list(range(first, first + 128)) for first in range(0, 24 * 128, 128)]
    turns = [
        Turn(100.0 * (n * 24 + k), ids, 512, 1, BLOCK_TOKENS, n * 24 + k)
        for n in range(2)
        for k, ids in enumerate(prompts)
    ]
    engine = EngineShape(capacity_tokens=640, host_tokens=20_000)  # one prompt, and what admission leaves free
    shape = ClusterShape(replicas=8, engine=engine)
    figures = Simulation(shape, turns, COSTS).run()
    assert figures["hit_ratio"] == 0.5
    assert figures["tier_hit_ratio"]["host"] > 0.3


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_is_answered_once_and_a_run_can_be_repeated(router: str) -> None:
    turns = found_turns(random_trace(1))
    shape = ClusterShape(
        replicas=4, router=router, ingresses=2, restarts=((50.0, 1),), sizes=((100.0, 6), (200.0, 3)), timeout_s=5.0
    )
    simulation = Simulation(shape, turns, COSTS)
    figures = simulation.run()
    assert figures["num_requests"] + figures["num_failed"] == len(turns)
    assert len({id(job.turn) for job in simulation.done}) == figures["num_requests"]
    assert all(job.due_s <= job.first_s <= job.ended_s for job in simulation.done)
    again = Simulation(shape, turns, COSTS).run()
    measured = ("took_s", "simulated_requests_per_minute")
    assert {k: v for k, v in again.items() if k not in measured} == {
        k: v for k, v in figures.items() if k not in measured
    }


def test_one_replica_with_room_finds_what_an_infinite_cache_does() -> None:
    turns = found_turns(random_trace(2))
    figures = Simulation(ClusterShape(replicas=1), turns, DEFAULT_RATES.cost_model()).run()
    assert figures["hit_ratio"] == pytest.approx(infinite_hit_ratio(turns), abs=1e-6)
    assert figures["hit_ratio"] > 0.3


@pytest.mark.parametrize("router", ["mneme", "power-of-two"])
@pytest.mark.parametrize("seed", [0, *rarer([1])])
def test_runs_of_decodes_are_what_their_steps_are(router: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One event for a run of alike steps changes no figure."""
    draw = random.Random(seed)
    sessions = SyntheticShape(num_sessions=40, sessions_per_s=1.5, num_turns=4, tokens_in=300, think_s=4, seed=seed)
    turns = found_turns(make_trace(sessions, draw.choice([16, 64, 512])))
    engine = EngineShape(capacity_tokens=draw.choice([None, 16_000, 30_000]), max_running=draw.choice([2, 8, 64]))
    if engine.capacity_tokens is not None:
        engine = replace(engine, host_tokens=draw.choice([0, 20_000]))
    shape = ClusterShape(
        replicas=3, router=router, engine=engine, seed=seed,
        timeout_s=draw.choice([None, 5.0]), restarts=((20.0, 1),),
    )  # fmt: skip
    figures = []
    for is_alike in (True, False):
        if not is_alike:
            monkeypatch.setattr(Replica, "_num_alike", lambda _replica: 0)
        simulation = Simulation(shape, turns, DEFAULT_RATES.cost_model())
        found = simulation.run()
        times = [(job.turn.session, job.replica, job.first_s, job.ended_s, tuple(job.found)) for job in simulation.done]
        figures.append(({name: each for name, each in found.items() if name not in TIMES}, times))
    assert figures[0] == figures[1]


def test_the_autoscaler_follows_a_burst_and_loses_nothing() -> None:
    quiet, burst = [10.0 * n for n in range(60)], [100 + 0.5 * n for n in range(200)]
    turns = [turn(at_s, [n], output_tokens=10) for n, at_s in enumerate(sorted(quiet + burst))]
    autoscale = AutoscaleConfig(min=1, max=6, downscale_delay_s=30.0)
    costs = Rates(prefill_tokens_per_s=8, kv_bytes_per_token=1, decode_step_s=0.01).cost_model()
    shape = ClusterShape(replicas=1, autoscale=autoscale, startup_s=10.0, engine=ONE.engine)
    figures = Simulation(shape, turns, costs).run()
    sizes = dict(figures["sizes"])
    assert figures["num_requests"] == len(turns)
    assert max(size for at_s, size in sizes.items() if at_s < 100) == 1 == figures["sizes"][-1][1]
    assert 1 < max(sizes.values()) <= 6
    assert min(at_s for at_s, size in sizes.items() if size > 1) >= 100 + autoscale.upscale_delay_s + shape.startup_s
    assert figures["ttft_p50_s"] < Simulation(ONE, turns, costs).run()["ttft_p50_s"]


def test_lines_that_wait_are_due_behind_what_they_wait_for() -> None:
    def asked(block_ids: list[int] | None, tokens: int, **more: Any) -> PacedRequest:
        return PacedRequest(more.pop("at_s", None), block_ids, tokens, 2, BLOCK_TOKENS, **more)

    trace = [
        asked([1, 2], 8, at_s=0.0, session_id="a", request_id="first"),
        asked(None, 6, session_id="a", delay_s=5.0, request_id="second"),
        asked([7], 4, at_s=1.0, request_id="tool"),
        asked([9], 4, wait_for=("second", "tool"), delay_s=1.0),
    ]
    simulation = Simulation(ONE, turns_of(trace), COSTS)
    figures = simulation.run()
    first, tool, second, last = simulation.done
    assert (first.turn.input_tokens, second.turn.input_tokens) == (8, 8 + 2 + 6)
    assert second.turn.block_ids[:2] == first.turn.block_ids
    assert second.due_s == pytest.approx(first.ended_s + 5.0)
    assert last.due_s == pytest.approx(max(second.ended_s, tool.ended_s) + 1.0)
    assert figures["hit_ratio"] == figures["infinite_hit_ratio"] == 2 / 8


def test_tenants_share_nothing_and_keep_their_order() -> None:
    turns = found_turns(random_trace(3))
    many = scaled(turns, 3, 2.0, seed=1)
    assert infinite_hit_ratio(many) == pytest.approx(infinite_hit_ratio(turns))
    assert len(many) == 3 * len(turns)
    assert [each.at_s for each in many] == sorted(each.at_s for each in many)
    assert {id(each) for turn in many for each in turn.after} <= {id(turn) for turn in many}
    assert scaled(turns, 1, 2.0, seed=1)[-1].at_s == turns[-1].at_s / 2


@pytest.mark.slow
def test_a_session_alone_loses_to_round_robin_where_clients_wait_for_each_other() -> None:
    ours, alone, in_turns = (played("sticky", router) for router in ("mneme", "hash", "round-robin"))
    assert alone["hit_ratio"] > in_turns["hit_ratio"]
    assert alone["ttft_mean_s"] > 1.3 * in_turns["ttft_mean_s"] > 1.3 * ours["ttft_mean_s"]
    assert alone["ttft_p99_s"] > 2 * in_turns["ttft_p99_s"]
    assert ours["in_flight_skew_p99"] < 2 < alone["in_flight_skew_p99"]


@pytest.mark.slow
def test_a_new_replica_is_not_sent_every_miss() -> None:
    ours, smallest_tree = played("death-spiral", "mneme"), played("death-spiral", "ray")
    assert ours["num_timeouts"] == ours["num_failed"] == 0 < smallest_tree["num_failed"]
    assert ours["in_flight_skew_p99"] < 3 < 6 < smallest_tree["in_flight_skew_p99"]


@pytest.mark.slow
def test_one_prompt_under_everything_does_not_gather_at_one_replica() -> None:
    ours, ray, sglang = (played("affinity-collapse", router, 736) for router in ("mneme", "ray", "sglang"))
    assert ours["hit_ratio"] == pytest.approx(ours["infinite_hit_ratio"], abs=0.01)
    assert ours["requests_skew"] < 1.25 < 7.9 < ray["requests_skew"]
    assert 2 * ours["ttft_p99_s"] < sglang["ttft_p99_s"] < ray["ttft_p99_s"]


@pytest.mark.slow
def test_what_is_reserved_at_once_does_not_herd() -> None:
    ours, polled = played("herding", "mneme", 355), played("herding", "polled", 355)
    assert 1.5 * ours["in_flight_skew_p99"] < polled["in_flight_skew_p99"]
    assert 2 * ours["ttft_p99_s"] < polled["ttft_p99_s"]


@pytest.mark.slow
def test_a_replica_that_restarts_leaves_no_ghosts() -> None:
    ours, ray, sglang = (played("restart-ghosts", router, 478) for router in ("mneme", "ray", "sglang"))
    assert ours["expected_minus_found"] < 0.01 < 0.05 < min(ray["expected_minus_found"], sglang["expected_minus_found"])
    assert ours["num_failed"] == 0 < ours["num_lost"]
