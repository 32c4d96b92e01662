"""What routing adds to a handle call: ours against Ray's power of two choices and its ConsistentHashRouter.

    python benchmarks/bench_router.py [--quick] [--json]

A driver calls a no-op deployment (two replicas, 2 KB prompt: 512 token ids of 4 bytes, a session id) one call at a
time, as latency is what routing adds to a request; throughput is bound by the two processes that exchange the calls.
The arms take turns call by call in one run. Added: our p50 less the smaller p50 of Ray's two. The routing decision
alone, without Ray, is timed as well. Bound: one actor call through the raylet-free path of Ray, about 1-3 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import secrets
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from mneme.router.chooser import ReplicaChooser
from mneme.router.score import RouterConfig

PROMPT_TOKENS = 512  # 2 KB as 32-bit ids
NUM_SESSIONS = 64
SEED = 0
ADDED_P50_TARGET_MS = 0.5
ROUTERS = {
    "ours": "mneme.router.serve_router.MnemeRequestRouter",
    "power_of_two": "ray.serve._private.request_router.pow_2_router.PowerOfTwoChoicesRequestRouter",
    "consistent_hash": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
}


def decision_ms(num_calls: int) -> float:
    """p50 of a select-and-reserve among eight replicas."""
    rng = random.Random(SEED)
    chooser = ReplicaChooser(RouterConfig())
    chooser.set_replicas([f"replica-{i}" for i in range(8)])
    times = []
    for i in range(num_calls):
        prompt = prompt_of(rng)
        started = time.perf_counter()
        reservation = chooser.select_and_reserve(prompt, session_id=f"s{i % NUM_SESSIONS}")
        times.append(time.perf_counter() - started)
        assert reservation is not None
        reservation.release()
    return statistics.median(times) * 1e3


def prompt_of(rng: random.Random) -> list[int]:
    """A prompt whose first half is shared by many, as a system prompt is."""
    return [*range(PROMPT_TOKENS // 2), *(rng.randrange(32_000) for _ in range(PROMPT_TOKENS // 2))]


async def call_times_ms(handles: dict[str, Any], num_calls: int) -> dict[str, list[float]]:
    """Times of calls, the arms taking turns in an order that changes every round."""
    rng = random.Random(SEED)
    times: dict[str, list[float]] = {arm: [] for arm in handles}
    for i in range(num_calls):
        prompt, session = prompt_of(rng), f"s{rng.randrange(NUM_SESSIONS)}"
        for arm in rng.sample(list(handles), len(handles)):
            handle = handles[arm].options(session_id=session)
            started = time.perf_counter()
            await handle.remote(prompt_token_ids=prompt, salt="")
            if i >= num_calls // 10:  # the first tenth warms up
                times[arm].append((time.perf_counter() - started) * 1e3)
    return times


def deploy() -> dict[str, Any]:
    """One no-op application per router."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    class NoOp:
        async def __call__(self, prompt_token_ids: list[int], salt: str) -> int:
            return len(prompt_token_ids)

    handles = {}
    for arm, path in ROUTERS.items():
        deployment = serve.deployment(
            name=arm,
            num_replicas=2,
            max_ongoing_requests=1000,
            ray_actor_options={"num_cpus": 0},
            request_router_config=RequestRouterConfig(request_router_class=path),
            logging_config={"enable_access_log": False},
        )(NoOp)
        handles[arm] = serve.run(deployment.bind(), name=arm, route_prefix=None)
    return handles


def measure(num_calls: int) -> dict[str, list[float]]:
    """Start a Ray instance of our own, call, stop it."""
    from mneme.cluster import environment
    from mneme.cluster.config import ClusterConfig
    from mneme.cluster.janitor import Janitor

    directory, marker = environment.make_directory(ClusterConfig()), secrets.token_hex(16)
    janitor = Janitor(marker, directory)
    variables = environment.cluster_environment(ClusterConfig(), marker, directory)
    environment.apply({**variables, "RAY_SERVE_ENABLE_HA_PROXY": "0"})  # there is no HTTP here
    import ray  # reads its environment at import
    from ray import serve

    try:
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=str(directory),
        )
        serve.start(proxy_location="Disabled")
        return asyncio.run(_deploy_and_call(num_calls))
    finally:
        janitor.clean()


async def _deploy_and_call(num_calls: int) -> dict[str, list[float]]:
    import ray

    try:
        handles = await asyncio.to_thread(deploy)
        return await call_times_ms(handles, num_calls)
    finally:
        await asyncio.to_thread(ray.shutdown)  # its callbacks need the loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer calls; at most 90 s on 2 cores")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    args = parser.parse_args()
    num_calls = 400 if args.quick else 2000
    decision = decision_ms(num_calls)
    times = measure(num_calls)
    p50 = {arm: statistics.median(values) for arm, values in times.items()}
    p99 = {arm: statistics.quantiles(values, n=100)[98] for arm, values in times.items()}
    added = p50["ours"] - min(p50["power_of_two"], p50["consistent_hash"])
    result = {
        "benchmark": "router",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "load_average": os.getloadavg(),
        "calls": num_calls,
        "prompt_tokens": PROMPT_TOKENS,
        "seed": SEED,
        "p50_ms": p50,
        "p99_ms": p99,
        "decision_p50_ms": decision,
        "checks": [
            {
                "name": "added_p50",
                "value": added,
                "unit": "ms",
                "target": f"<= {ADDED_P50_TARGET_MS}",
                "ok": added <= ADDED_P50_TARGET_MS,
            }
        ],
    }
    if not args.json:
        for arm in ROUTERS:
            print(f"{arm:16} p50 {p50[arm]:.2f} ms  p99 {p99[arm]:.2f} ms")
        print(f"decision alone   p50 {decision:.3f} ms, load average {os.getloadavg()[0]:.1f}")
    print(json.dumps(result))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
