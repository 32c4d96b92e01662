"""Plans against brute force, and against simulated tiers whose rates change."""

from __future__ import annotations

import random
import statistics
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mneme.cachetier.names import EDGES, Edge
from mneme.cachetier.policy.cost_model import CostModel, Terms
from mneme.cachetier.policy.load_controller import TOLERANCE, Loadable, LoadController, LoadPlan, overlapped_s
from tests.cachetier.cost_cases import TOKEN_BYTES, PlayedClock, make_costs

NUM_LAYERS = 12
CHUNK = 256
THROTTLED: Terms = (1e-3, 1e-3, 1 / 50e6)
FAST: Terms = (1e-4, 1e-5, 1 / 5e9)


def chunks_of(num_tokens: int, *edges: Edge, token_bytes: int = TOKEN_BYTES) -> list[Loadable]:
    """Full chunks over the edges in turn, the last short."""
    starts = range(0, num_tokens, CHUNK)
    sizes = [min(CHUNK, num_tokens - start) for start in starts]
    return [Loadable(size, size * token_bytes, edges[i % len(edges)]) for i, size in enumerate(sizes)]


def first_token_s(
    costs: CostModel, num_resident: int, num_tokens: int, chunks: list[Loadable], *, is_alone: bool = True
) -> float:
    """With all of these chunks loaded; written apart from the controller."""
    num_known = min(num_resident + sum(chunk.num_tokens for chunk in chunks), num_tokens - 1)
    first = min(num_tokens - num_known, costs.step_rows)
    context = num_known
    compute_s = costs.prefill_s(num_tokens - num_known, context)
    if not chunks:
        return compute_s
    near_s, far_s = 0.0, 0.0
    for edge in EDGES:
        sizes = [each.num_bytes for each in chunks if each.edge == edge]
        seconds = costs.edge_s(edge, sum(sizes), len(sizes))
        near_s, far_s = (near_s + seconds, far_s) if edge == "host" else (near_s, far_s + seconds)
    first_s = costs.prefill_s(first, context)
    if is_alone:
        return overlapped_s(near_s + far_s, first_s, NUM_LAYERS) + compute_s - first_s
    return near_s + far_s + compute_s


rates = st.tuples(st.floats(1e-5, 1e-1), st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-6))
runs = st.lists(st.tuples(st.integers(1, CHUNK), st.integers(0, 1 << 24), st.sampled_from(EDGES)), max_size=24)


@given(rates, st.integers(1, 20), st.integers(1, 2000))
def test_behind_the_read_buffer_no_layer_is_waited_for(disk: Terms, num_chunks: int, num_new: int) -> None:
    """And it is the paper's and one layer: B (T_load L_hist - T_pref L_new)."""
    costs, chunks = make_costs(disk=disk), chunks_of(num_chunks * CHUNK, "disk")
    controller = LoadController(costs, num_layers=NUM_LAYERS, loads_all=True)
    plan = controller.plan(0, num_chunks * CHUNK + num_new, chunks, is_alone=False)
    num_bytes = sum(chunk.num_bytes for chunk in chunks)
    load_s = costs.edge_s("disk", num_bytes, num_chunks)
    if plan.num_chunks > plan.step_chunks:
        assert plan.buffer_bytes > num_bytes  # it comes in several steps, from memory
        return
    begin_s = plan.buffer_bytes / num_bytes * load_s
    first_s = costs.prefill_s(min(num_new, costs.step_rows), num_chunks * CHUNK)
    for layer in range(NUM_LAYERS):
        assert (layer + 1) / NUM_LAYERS * load_s <= (begin_s + layer / NUM_LAYERS * first_s) * (1 + 1e-9)
    gap_s = max(load_s - first_s, 0.0)
    assert plan.buffer_bytes == pytest.approx(num_bytes / load_s * gap_s + num_bytes / NUM_LAYERS)


@given(rates, rates, rates, runs, st.integers(0, 5000), st.integers(1, 5000), st.booleans())
def test_plans_are_the_best_there_is(
    host: Terms,
    disk: Terms,
    peer: Terms,
    run: list[tuple[int, int, Edge]],
    num_resident: int,
    num_new: int,
    is_alone: bool,
) -> None:
    costs = make_costs(host=host, disk=disk, peer_host=peer, peer_disk=peer)
    chunks, num_tokens = [Loadable(*each) for each in run], num_resident + num_new
    controller = LoadController(costs, num_layers=NUM_LAYERS)
    plan = controller.plan(num_resident, num_tokens, chunks, is_alone=is_alone)
    heads = [chunks[:k] for k in range(len(chunks) + 1)]
    by_count = [first_token_s(costs, num_resident, num_tokens, head, is_alone=is_alone) for head in heads]
    assert plan.predicted_ttft_s == pytest.approx(by_count[plan.num_chunks])
    assert plan.predicted_ttft_s <= by_count[0] * (1 + 1e-9)
    assert plan.predicted_ttft_s <= min(by_count) + (0.02 + 1e-9) * by_count[0]


@given(rates, runs, st.integers(1, 5000), st.booleans())
def test_what_is_waited_for_bounds_what_a_load_may_cost(
    disk: Terms, run: list[tuple[int, int, Edge]], num_new: int, is_alone: bool
) -> None:
    costs = make_costs(host=disk, disk=disk, peer_host=disk, peer_disk=disk)
    chunks = [Loadable(*each) for each in run]
    plan = LoadController(costs, num_layers=NUM_LAYERS).plan(0, num_new, chunks, is_alone=is_alone)
    computing_s, loaded = costs.prefill_s(num_new, 0), chunks[: plan.num_chunks]
    load_s = World(costs, random.Random()).exact_s(loaded)
    assert plan.may_wait_s >= TOLERANCE * computing_s * (1 - 1e-9)
    assert plan.may_wait_s <= max(computing_s / 4, 2 * load_s) * (1 + 1e-9)  # given up
    num_known = min(sum(chunk.num_tokens for chunk in loaded), num_new - 1)
    rest_s = costs.prefill_s(num_new - num_known, num_known)
    assert rest_s + plan.may_wait_s <= (1 + TOLERANCE) * computing_s * (1 + 1e-9)  # kept to its end
    if plan.num_chunks:  # and what was predicted may come
        assert plan.predicted_ttft_s - rest_s < plan.may_wait_s


def test_a_disk_slower_than_computing_is_read_alone_only() -> None:
    """Beside it, layer by layer; what is waited for would only come first."""
    disk, host = (0.0, 0.0, 2e-3 / TOKEN_BYTES), (0.0, 0.0, 1e-3 / TOKEN_BYTES)
    costs = make_costs(prefill=(0.0, 1e-3, 0.0), disk=disk, host=host)
    controller = LoadController(costs, num_layers=NUM_LAYERS)
    chunks = chunks_of(2048, "disk")
    plan = controller.plan(0, 2048, chunks)
    assert plan.num_chunks > 1
    assert plan.step_chunks == costs.step_rows // CHUNK
    assert controller.plan(0, 2048, chunks, is_alone=False).num_chunks == 0


def test_ties_and_nothing_to_load_are_computed() -> None:
    costs = make_costs(prefill=(0.0, 0.0, 0.0), host=FAST)
    controller = LoadController(costs, num_layers=NUM_LAYERS)
    assert controller.plan(0, 512, chunks_of(512, "host")).num_chunks == 0
    assert controller.plan(100, 512, []).num_chunks == 0
    costs = make_costs(host=FAST)
    assert LoadController(costs).plan(0, 1, chunks_of(1, "host")).num_chunks == 0


def test_a_lookup_is_waited_for_a_hundredth_and_used_as_long_as_rows_are_left() -> None:
    controller = LoadController(make_costs())
    computing_s = make_costs().prefill_s(8192, 100)
    assert controller.lookup_wait_s(0, 10) == pytest.approx(make_costs().prefill_s(1, 0))  # one more step
    assert controller.lookup_wait_s(100, 8292) == pytest.approx(0.05 * computing_s)  # all was found as far as is known
    for _ in range(100):
        controller.learn_answer(0, 4096)
    assert controller.lookup_wait_s(100, 8292) == pytest.approx(0.01 * computing_s)
    assert controller.lookup_timeout_s(100, 8292) == pytest.approx(1.01 * computing_s)


def test_an_answer_that_is_learned_to_take_longer_than_a_step_more_is_not_waited_for() -> None:
    costs = make_costs()  # 5 ms for each step
    controller = LoadController(costs)
    costs.learn_lookup(0.0035)
    assert controller.lookup_wait_s(0, 10) > 0.005
    costs = make_costs()
    costs.learn_lookup(0.02)
    controller = LoadController(costs)
    assert controller.lookup_wait_s(0, 10) == 0
    assert controller.lookup_wait_s(0, 100_000) > 0.02  # a hundredth of what computing takes
    assert controller.lookup_wait_s(100, 800, 512) > 0.02  # known to be there
    assert LoadController(costs, loads_all=True).lookup_wait_s(0, 10) > 1


def test_what_is_asked_in_vain_is_asked_seldom_until_something_is_found() -> None:
    """An answer takes 1 ms, computing 10 tokens 5: after 16 answers of nothing that is more than it saves."""
    controller = LoadController(make_costs())
    assert controller.asks(0, 10)
    for _ in range(30):
        controller.learn_answer(0, 10)
    assert sum(controller.asks(0, 10) for _ in range(160)) == 10
    assert controller.asks(0, 8192)  # an answer takes less than a hundredth of what computing does
    assert controller.asks(0, 10, 10)  # known to be there
    assert LoadController(make_costs(), loads_all=True).asks(0, 10)
    for _ in range(3):
        controller.learn_answer(10, 10)
    assert all(controller.asks(0, 10) for _ in range(16))


def test_who_would_have_an_answer_later_than_it_has_computed_all_does_not_ask() -> None:
    costs = make_costs()
    costs.learn_lookup(0.02)
    controller = LoadController(costs)
    assert [controller.asks(0, num_tokens) for num_tokens in (10, 8192)] == [False, True]


def test_a_lookup_of_what_a_session_stored_is_waited_for_as_long_as_that_would_take() -> None:
    controller = LoadController(make_costs())
    stored_s = make_costs().prefill_s(4096, 100)
    assert controller.lookup_wait_s(100, 8292, 4096) == pytest.approx(stored_s)


@pytest.mark.parametrize(("slowness", "num_loaded"), [(0.5, "all"), (1.5, "all"), (2.5, "some")])
def test_a_sessions_history_is_loaded_unless_that_takes_twice_as_long_as_computing_it(
    slowness: float, num_loaded: str
) -> None:
    """The edge's speed is such that all of it takes so many times what computing takes."""
    num_tokens, chunks = 2048, chunks_of(2048, "disk")
    seconds = make_costs().prefill_s(num_tokens, 0)
    costs = make_costs(disk=(0.0, slowness * seconds / len(chunks), 0.0))
    controller = LoadController(costs, num_layers=NUM_LAYERS)
    plan = controller.plan(0, num_tokens + 1, chunks, num_stored=num_tokens, is_alone=False)
    assert (plan.num_chunks == len(chunks)) == (num_loaded == "all")
    assert plan.predicted_ttft_s <= 2.01 * seconds
    assert costs.edge_s("disk", 1, plan.num_chunks) < plan.may_wait_s <= 2.01 * seconds
    others = controller.plan(0, num_tokens + 1, chunks, is_alone=False)
    assert (others.num_chunks == len(chunks)) == (slowness < 1)


def test_who_loads_all_neither_weighs_nor_gives_up() -> None:
    costs = make_costs(disk=(1.0, 1.0, 1e-3))  # far slower than computing
    costs.learn_edge("disk", 1, 1, 100.0)
    plan = LoadController(costs, num_layers=NUM_LAYERS, loads_all=True).plan(
        0, 1000, chunks_of(900, "disk"), is_alone=False
    )
    assert plan.num_chunks == len(chunks_of(900, "disk"))
    hour_s = 3600.0
    assert plan.may_wait_s > hour_s


class World(NamedTuple):
    """The true costs, and what a request then takes."""

    true: CostModel
    noise: random.Random

    def exact_s(self, chunks: list[Loadable]) -> float:
        return sum(
            self.true.edge_s(edge, sum(c.num_bytes for c in chunks if c.edge == edge), count)
            for edge in EDGES
            if (count := sum(c.edge == edge for c in chunks))
        )

    def load_s(self, chunks: list[Loadable]) -> float:
        return self.exact_s(chunks) * self.noise.lognormvariate(0, 0.1)

    def compute_s(self, num_resident: int, num_tokens: int) -> float:
        exact_s = self.true.prefill_s(num_tokens - num_resident, num_resident)
        return exact_s * self.noise.lognormvariate(0, 0.05)


def serve(world: World, costs: CostModel, plan: LoadPlan, chunks: list[Loadable], num_tokens: int) -> float:
    """Seconds to the first token under a plan."""
    computing_s = world.compute_s(0, num_tokens)
    if not plan.num_chunks:
        costs.learn_step([(num_tokens, 0)], computing_s)
        return computing_s
    loaded = chunks[: plan.num_chunks]
    edge, num_bytes = loaded[0].edge, sum(chunk.num_bytes for chunk in loaded)
    load_s = world.load_s(loaded)
    num_known = min(sum(chunk.num_tokens for chunk in loaded), num_tokens - 1)
    tail_s = world.compute_s(num_known, num_tokens)
    waited_s = overlapped_s(load_s, tail_s, NUM_LAYERS) - tail_s
    if waited_s > plan.may_wait_s:
        come = max(plan.may_wait_s / load_s, 1e-3)
        costs.learn_edge(edge, int(num_bytes * come), plan.num_chunks * come, plan.may_wait_s)
        return plan.may_wait_s + computing_s
    costs.learn_edge(edge, num_bytes, plan.num_chunks, load_s)
    return waited_s + tail_s


@pytest.mark.parametrize("seed", range(5))
def test_loading_is_never_slower_than_computing(seed: int) -> None:
    """Interleaved pairs while the disk is fast, throttled, fast again: medians within 5% in each stretch."""
    clock = PlayedClock()
    fast, throttled = make_costs(clock, disk=FAST), make_costs(clock, disk=THROTTLED)
    costs = make_costs(clock, disk=FAST)
    controller = LoadController(costs, num_layers=NUM_LAYERS)
    noise = random.Random(seed)
    chunks, num_tokens = chunks_of(1536, "disk", token_bytes=131_072), 1600
    for true in (fast, throttled, fast, throttled):
        world, ratios, counts = World(true, noise), [], []
        for _ in range(48):
            clock.now_s += 3
            plan = controller.plan(0, num_tokens, chunks)
            ratios.append(serve(world, costs, plan, chunks, num_tokens) / world.compute_s(0, num_tokens))
            counts.append(plan.num_chunks)
        assert statistics.median(ratios) <= 1 + TOLERANCE
        if true is throttled:
            assert statistics.mean(count > 1 for count in counts) < 0.3
        else:
            assert statistics.median(counts) >= 4
            assert statistics.median(ratios) < 0.5


def test_what_made_an_edge_look_slow_is_forgotten() -> None:
    clock = PlayedClock()
    costs = make_costs(clock, disk=FAST)
    controller = LoadController(costs, num_layers=NUM_LAYERS)
    true_s = costs.edge_s("disk", CHUNK * TOKEN_BYTES)
    for _ in range(12):
        costs.learn_edge("disk", CHUNK * TOKEN_BYTES, 1, 2000 * true_s)
    chunks = chunks_of(4096, "disk")
    assert controller.plan(0, 4160, chunks).num_chunks <= 1
    waited = 0
    while controller.plan(0, 4160, chunks).num_chunks <= 1:
        clock.now_s += 1
        waited += 1
        assert waited < 300


def test_an_edge_that_was_never_measured_is_tried_before_it_is_given_up() -> None:
    """And again when that is forgotten."""
    clock = PlayedClock()
    costs = make_costs(clock, prefill=(0.0, 5e-6, 0.0))
    controller = LoadController(costs, num_layers=NUM_LAYERS)
    chunks, num_tokens = chunks_of(32_768, "peer_host", token_bytes=8192), 33_000
    plan = controller.plan(0, num_tokens, chunks)
    assert plan.num_chunks == 1
    costs.learn_edge("peer_host", chunks[0].num_bytes, 1, costs.edge_s("peer_host", chunks[0].num_bytes))
    assert controller.plan(0, num_tokens, chunks).num_chunks == 0
    clock.now_s += 600
    assert controller.plan(0, num_tokens, chunks).num_chunks == 1
