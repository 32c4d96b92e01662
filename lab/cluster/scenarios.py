"""Small cases in which known rules fail, each as its own trace and cluster; routers are compared on them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mneme.lab.cluster.simulated_replica import EngineShape
from mneme.lab.cluster.simulation import ClusterShape
from mneme.lab.cluster.workload import Turn

BLOCK_TOKENS = 512
_OUTPUT_TOKENS = 128


class Scenario(NamedTuple):
    shape: ClusterShape
    turns: list[Turn]


def sticky(seed: int) -> Scenario:
    rng, ids = random.Random(seed), itertools.count()
    turns = [
        turn
        for session in range(256)
        for turn in _session(ids, rng, session, 0.0, num_turns=12, think_s=0.1, block_tokens=32)
    ]
    engine = EngineShape(max_running=16)  # as many as come to one replica of eight
    return Scenario(ClusterShape(replicas=8, engine=engine, concurrency=128, seed=seed), turns)


def death_spiral(seed: int) -> Scenario:
    arrivals = _poisson(random.Random(seed), per_s=5.0, span_s=180.0)
    turns = _single(itertools.count(), arrivals, [], num_new=16)
    return Scenario(ClusterShape(replicas=7, sizes=((90.0, 8),), timeout_s=10.0, seed=seed), turns)


def affinity_collapse(seed: int) -> Scenario:
    ids = itertools.count()
    system = [next(ids) for _ in range(16)]
    turns = _single(ids, _poisson(random.Random(seed), per_s=50.0, span_s=60.0), system, num_new=1)
    return Scenario(ClusterShape(replicas=8, seed=seed), turns)


def herding(seed: int) -> Scenario:
    turns = _single(itertools.count(), _poisson(random.Random(seed), per_s=12.0, span_s=120.0), [], num_new=8)
    return Scenario(ClusterShape(replicas=8, report_s=1.0, ingresses=2, seed=seed), turns)


def restart_ghosts(seed: int) -> Scenario:
    rng, ids = random.Random(seed), itertools.count()
    turns = [
        turn
        for session, at_s in enumerate(_poisson(rng, per_s=2.0, span_s=120.0))
        for turn in _session(ids, rng, session, at_s, num_turns=8, think_s=15.0, block_tokens=BLOCK_TOKENS)
    ]
    restarts = tuple((60.0 + 10 * number, number) for number in range(8))
    return Scenario(ClusterShape(replicas=8, restarts=restarts, seed=seed), turns)


class Case(NamedTuple):
    make: Callable[[int], Scenario]  # from a seed
    shows: str
    routers: tuple[str, ...]  # to be compared unless others are named


SCENARIOS = {
    "sticky": Case(
        sticky,
        "sessions in a closed loop, as many at once as all replicas have streams: a few sessions too many at one wait "
        "there turn by turn, and a session's replica alone is slower than round robin (Dynamo's replay, 2026)",
        ("mneme", "hash", "round-robin"),
    ),
    "death-spiral": Case(
        death_spiral,
        "a replica joins a busy cluster whose clients ask again after 10 s: a rule that sends every miss to the "
        "smallest tree sends it all of them, and they fail (sglang#14305)",
        ("mneme", "ray"),
    ),
    "affinity-collapse": Case(
        affinity_collapse,
        "one system prompt under everything, no sessions: a rule that follows the longest match sends all to one "
        "replica; one that drops affinity when loads differ computes it again (sglang#32195)",
        ("mneme", "ray", "sglang"),
    ),
    "herding": Case(
        herding,
        "two ingresses with load reports that are a second old, and prompts that share nothing: a rule that reads "
        "reports alone sends all that comes meanwhile to the same replica; look at TTFT p99 and at the load in use",
        ("mneme", "polled", "round-robin"),
    ),
    "restart-ghosts": Case(
        restart_ghosts,
        "replicas restart in turn: an index that is not told expects what is gone (llm-d-router#2853)",
        ("mneme", "ray", "sglang"),
    ),
}


def _poisson(rng: random.Random, *, per_s: float, span_s: float) -> Iterator[float]:
    now_s = rng.expovariate(per_s)
    while now_s < span_s:
        yield now_s
        now_s += rng.expovariate(per_s)


def _single(ids: Iterator[int], arrivals: Iterator[float], system: list[int], *, num_new: int) -> list[Turn]:
    """Requests of one turn each: the system prompt, and so many blocks of their own."""
    turns = []
    for session, at_s in enumerate(arrivals):
        blocks = [*system, *itertools.islice(ids, num_new)]
        turns.append(Turn(at_s, blocks, len(blocks) * BLOCK_TOKENS, _OUTPUT_TOKENS, BLOCK_TOKENS, session))
    return turns


def _session(
    ids: Iterator[int],
    rng: random.Random,
    session: int,
    at_s: float,
    *,
    num_turns: int,
    think_s: float,
    block_tokens: int,
) -> Iterator[Turn]:
    """A conversation that begins with eight blocks and grows by two a turn."""
    blocks, after = [*itertools.islice(ids, 8)], tuple[Turn, ...]()
    for _ in range(num_turns):
        delay_s, tokens = rng.expovariate(1 / think_s), len(blocks) * block_tokens
        turn = Turn(at_s, [*blocks], tokens, _OUTPUT_TOKENS, block_tokens, session, after, delay_s)
        yield turn
        after = (turn,)
        blocks += itertools.islice(ids, 2)
