"""Next turns of a session on replicas in other processes, over the cluster's cache tier; the `--ray` part of
bench_cache_turn.py. A cluster of two nodes on this machine."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from typing import Any

import ray
import torch
from cache_engines import CachedModel, answer, bare_model, make_engine, pages_for, wait_for_saves
from cache_turns import MIN_CACHED, NUM_ANSWER, NUM_NEW, Draw
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tier_io.stores import TwoNodes

from mneme.cachetier.config import CacheConfig
from mneme.cachetier.distributed.lifecycle import shutdown_cache_tier, start_cache_tier
from mneme.cachetier.policy.cost_model import Calibration

APPLICATION = "bench"
HOST_BYTES = 256 << 20
_TIMEOUT_S = 600.0
_CLOSE_S = 20.0
SOURCES = {"host": "host", "peer": "peer"}  # a replica on the node that has the chunks, and one on the other


class Replica:
    """One engine with the cluster's tier and one without it, in a process of its own."""

    def __init__(self, shape: str, num_history: int, calibration: Calibration, seed: int) -> None:
        torch.set_num_threads(1)
        config = CacheConfig(host_bytes=HOST_BYTES)
        model = bare_model(shape, num_history + 4 * NUM_NEW, seed)._replace(calibration=calibration)
        num_pages = pages_for(num_history + 2 * NUM_NEW)
        self._store = start_cache_tier(config, APPLICATION)
        self._engines = {
            True: make_engine(model, self._store, config, num_pages),
            False: make_engine(model, None, config, num_pages),
        }

    def tell(self, ids: list[int]) -> list[int]:
        """The session so far; all of it is saved."""
        told = answer(self._engines[True], ids, NUM_ANSWER).token_ids
        wait_for_saves(self._engines[True])
        return ids + told

    def turn(self, ids: list[int], has_tier: bool) -> tuple[float, dict[str, int]]:
        """Seconds to the first token, and where the prompt's KV came from; nothing of it is on the device."""
        engine = self._engines[has_tier]
        engine.forest.clear()
        took = answer(engine, ids, 1)
        wait_for_saves(engine)
        return took.ttft_s, took.usage.kv_details()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def ray_rows(
    cluster: TwoNodes, model: CachedModel, shape: str, num_history: int, num_rounds: int, seed: int
) -> list[dict[str, Any]]:
    """A row per place of the replica, which also computes the same turn anew, in alternation."""
    draw = Draw(seed)
    with ExitStack() as ends:
        ends.callback(shutdown_cache_tier, APPLICATION, timeout_s=_CLOSE_S)

        def replica(node: str) -> Any:
            strategy = NodeAffinitySchedulingStrategy(cluster.nodes[node], soft=False)
            made = ray.remote(num_cpus=0)(Replica).options(scheduling_strategy=strategy)
            actor = made.remote(shape, num_history, model.calibration, seed)
            ends.callback(ray.kill, actor)
            return actor

        author = replica("host")
        history = _asked(author.tell.remote(draw.ids(num_history - NUM_ANSWER)))
        return [_row(replica(node), node, history, draw, num_rounds) for node in SOURCES]


def _row(reader: Any, node: str, history: list[int], draw: Draw, num_rounds: int) -> dict[str, Any]:
    found: dict[bool, list[float]] = {True: [], False: []}
    cached: list[int] = []
    for number in range(num_rounds + 1):
        for has_tier in (True, False) if number % 2 else (False, True):
            ttft_s, kv = _asked(reader.turn.remote(history + draw.question(), has_tier))
            if number:
                found[has_tier].append(ttft_s)
                cached += [kv[SOURCES[node]]] if has_tier else []
    pairs = list(zip(found[True], found[False], strict=True))
    return {
        "history": len(history),
        "replica": f"another process, {'same' if node == 'host' else 'other'} node",
        "rounds": num_rounds,
        "recompute ms": statistics.median(found[False]) * 1e3,
        "ttft ms": statistics.median(found[True]) * 1e3,
        "lower by": statistics.median(1 - a / b for a, b in pairs),
        "cached share": min(cached) / len(history),
        "not found": sum(each < MIN_CACHED * len(history) for each in cached),  # rounds, also those not in time
    }


def _asked(answer_ref: Any) -> Any:
    return ray.get(answer_ref, timeout=_TIMEOUT_S)
