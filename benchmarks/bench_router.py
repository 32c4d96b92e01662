"""What routing adds to a request on its way to a replica: ours against Ray Serve's own routers.

    python benchmarks/bench_router.py [--quick] [--json]

Requests are placed inside the ingress: `RayEngineClient` asks its `ReplicaChooser` for a replica, sends the request
there by a call that names it (`HandleCalls.call`, over the handle's `MnemeRequestRouter`, which only follows the
name), and notes the answer's tokens when it ends. The arm `ours` does these steps with the same classes. The others
are the same call, by the same transport, that names no replica: Ray's power of two choices and its
ConsistentHashRouter choose. All go to no-op deployments of two replicas, one call at a time, as latency is what routing
adds to a request: prompts of 512 tokens, half of them shared, of 64 sessions.

The arms take turns call by call in one run. Added: our p50 less the smaller p50 of Ray's two. `decision`: the
chooser's part of it alone, among eight replicas. What bounds it: one actor call, about 1 to 3 ms.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from harness import Run, at_most, options_of

from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.router.chooser import ReplicaChooser
from mneme.router.score import RouterConfig

PROMPT_TOKENS = 512
NUM_ANSWER = 64  # tokens: the router notes prompt and answer together when a request ends
NUM_SESSIONS = 64
SEED = 0
ADDED_P50_TARGET_MS = 0.5
OURS = "ours"
ROUTERS = {
    OURS: "mneme.router.serve_router.MnemeRequestRouter",
    "power_of_two": "ray.serve._private.request_router.pow_2_router.PowerOfTwoChoicesRequestRouter",
    "consistent_hash": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
}
Call = Callable[[GenerationRequest], Awaitable[Any]]


def make_request(rng: random.Random, number: int) -> GenerationRequest:
    """A prompt whose first half is shared by many, as a system prompt is."""
    own = (rng.randrange(32_000) for _ in range(PROMPT_TOKENS // 2))
    return GenerationRequest(
        request_id=str(number),
        prompt_token_ids=(*range(PROMPT_TOKENS // 2), *own),
        sampling=SamplingParams(seed=0),
        session_id=f"s{rng.randrange(NUM_SESSIONS)}",
    )


def place(chooser: ReplicaChooser, request: GenerationRequest) -> str:
    """Choose a replica for a request that ends at once, and note what that replica holds then."""
    ids = request.prompt_token_ids
    reservation = chooser.select_and_reserve(ids, salt=request.salt, session_id=request.session_id)
    assert reservation is not None
    reservation.release()
    chooser.record((*ids, *ids[:NUM_ANSWER]), reservation.replica_id, salt=request.salt)
    return reservation.replica_id


def decision_ms(num_calls: int) -> float:
    """p50 of the chooser's part among eight replicas."""
    rng, times = random.Random(SEED), []
    chooser = ReplicaChooser(RouterConfig())
    chooser.set_replicas([f"replica-{i}" for i in range(8)])
    for number in range(num_calls):
        request = make_request(rng, number)
        started = time.perf_counter()
        place(chooser, request)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def deploy() -> dict[str, Any]:
    """One no-op application per router; their handles."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    class NoOp:
        async def submit_many(self, requests: Sequence[Any], replica_id: str = "", subscriber: str = "") -> list[None]:
            return [None] * len(requests)

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


async def placed_by_us(handle: Any) -> Call:
    """Calls as an ingress makes them."""
    from mneme.cluster.serve.ray_private import HandleCalls, start_router
    from mneme.router import replica_set

    chooser, calls, loop = ReplicaChooser(RouterConfig()), HandleCalls(handle), asyncio.get_running_loop()
    known = asyncio.Event()

    def changed(replica_ids: frozenset[str]) -> None:
        chooser.set_replicas(replica_ids)
        if replica_ids:
            known.set()

    start_router(handle)
    replica_set.listen(handle.deployment_name, lambda replica_ids: loop.call_soon_threadsafe(changed, replica_ids))
    await known.wait()
    return lambda request: calls.call(place(chooser, request), "submit_many", subscriber="bench", requests=[request])


def placed_by_ray(handle: Any) -> Call:
    """The same call, for whichever replica Ray's router chooses."""
    method = handle.options(method_name="submit_many", _by_reference=False)
    return lambda request: method.options(session_id=request.session_id).remote(requests=[request])


async def call_times_ms(calls: dict[str, Call], num_calls: int) -> dict[str, list[float]]:
    """Times of calls, the arms taking turns in an order that changes every round."""
    rng = random.Random(SEED)
    times: dict[str, list[float]] = {arm: [] for arm in calls}
    for number in range(num_calls):
        request = make_request(rng, number)
        for arm in rng.sample(list(calls), len(calls)):
            started = time.perf_counter()
            await calls[arm](request)
            if number >= num_calls // 10:  # the first tenth warms up
                times[arm].append((time.perf_counter() - started) * 1e3)
    return times


def measure(num_calls: int) -> dict[str, list[float]]:
    """Start a Ray instance of our own, call, stop it."""
    from mneme.cluster.config import ClusterConfig
    from mneme.cluster.run import environment
    from mneme.cluster.run.janitor import Janitor

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
        calls = {arm: placed_by_ray(handle) for arm, handle in handles.items() if arm != OURS}
        return await call_times_ms({OURS: await placed_by_us(handles[OURS]), **calls}, num_calls)
    finally:
        await asyncio.to_thread(ray.shutdown)  # its callbacks need the loop


def main() -> None:
    parser = options_of(__doc__, quick="fewer calls; at most 90 s on 2 cores", seed=False)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    args = parser.parse_args()
    num_calls = 400 if args.quick else 2000
    run = Run("router", args, calls=num_calls, prompt_tokens=PROMPT_TOKENS)
    decision = decision_ms(num_calls)
    times = measure(num_calls)
    p50 = {arm: statistics.median(values) for arm, values in times.items()}
    p99 = {arm: statistics.quantiles(values, n=100)[98] for arm, values in times.items()}
    for arm in ROUTERS:
        run.say(f"{arm:16} p50 {p50[arm]:.2f} ms  p99 {p99[arm]:.2f} ms")
    run.say(f"decision alone   p50 {decision:.3f} ms")
    added = p50[OURS] - min(ms for arm, ms in p50.items() if arm != OURS)
    run.check(at_most("added_p50", added, ADDED_P50_TARGET_MS, "ms"))
    run.end({"p50_ms": p50, "p99_ms": p99, "decision_p50_ms": decision})


if __name__ == "__main__":
    main()
