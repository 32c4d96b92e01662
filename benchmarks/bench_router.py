"""What routing adds to a request on its way to a replica: ours against Ray Serve's own routers.

    python benchmarks/bench_router.py [--quick] [--choices] [--json]

Requests are placed inside the ingress: `RayEngineClient` asks its `ReplicaChooser` for a replica, sends the request
there by a call that names it (`HandleCalls.call`, over the handle's `MnemeRequestRouter`, which only follows the
name), and notes the answer's tokens when it ends. The arm `ours` does these steps with the same classes. The others
are the same call, by the same transport, that names no replica: Ray's power of two choices and its
ConsistentHashRouter choose. All go to no-op deployments of two replicas, one call at a time, as latency is what routing
adds to a request: prompts of 512 tokens, half of them shared, of 64 sessions.

The arms take turns call by call in one run. Added: our p50 less the smaller p50 of Ray's two. `choice`: one choice
among 100 replicas that hold 1,000,000 blocks together, on nodes of eight with a cache tier that has as many, and have
all reported loads and costs; prompts of 2,048 tokens, half of them one of eight system prompts that every replica has:
with hashing the prompt, pricing, reserving; wall time, and the thread's own (`choice_cpu`, whose p99 is the promise),
which does not count that others run on its core. `report`: taking a replica's report of 16 blocks that came and 16 that
went. What bounds calls: one actor call, about 1 to 3 ms; what bounds choices: hashing, about a third of one.
"""

from __future__ import annotations

import asyncio
import gc
import random
import secrets
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from harness import Run, at_most, options_of

from mneme.cachetier.policy.cost_model import CostModel
from mneme.replicas.report import ReplicaReport, pack
from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.router.chooser import ReplicaChooser, Reservation
from mneme.router.score import RouterConfig
from mneme.router.token_hashes import block_hashes

PROMPT_TOKENS = 512
NUM_ANSWER = 64  # tokens: the router notes prompt and answer together when a request ends
NUM_SESSIONS = 64
SEED = 0
ADDED_P50_TARGET_MS = 0.5
NUM_REPLICAS, NUM_BLOCKS, LONG_PROMPT, NUM_SYSTEM, NUM_ON_NODE = 100, 1_000_000, 2048, 8, 8
CHOICE_P50_TARGET_MS, CHOICE_P99_TARGET_MS = 0.3, 1.0
COST = CostModel.from_mapping({
    "prefill": [0.01, 1e-4, 1e-9],
    "decode": [0.01, 1e-4, 1e-8],
    "edges": {},
    "step_rows": 2048,
    "kv_bytes_per_token": 131_072,
    "scales": {},
}).figures()  # fmt: skip
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


def report(rng: random.Random, replica: int, seq: int, **values: Any) -> ReplicaReport:
    """What a replica with some load says."""
    return ReplicaReport(
        epoch=f"epoch-{replica}",
        seq=seq,
        backlog_s=rng.random(),
        queued_tokens=rng.randrange(10_000),
        running=rng.randrange(20),
        waiting=0,
        context_tokens=rng.randrange(40_000),
        free_page_share=0.5,
        node=f"node-{replica // NUM_ON_NODE}",
        **values,
    )


def choices(num_calls: int) -> dict[str, float]:
    """Times of choices among many replicas with much KV, and of taking reports between them."""
    rng, names = random.Random(SEED), [f"replica-{i}" for i in range(NUM_REPLICAS)]
    chooser = ReplicaChooser(RouterConfig(), index_blocks=2 * NUM_BLOCKS)
    chooser.set_replicas(names)
    half = LONG_PROMPT // 2
    systems = [tuple(rng.randrange(32_000) for _ in range(half)) for _ in range(NUM_SYSTEM)]
    shared = [block.to_bytes(8, "little") for system in systems for block in block_hashes(system)]
    own = [[rng.randbytes(8) for _ in range(NUM_BLOCKS // NUM_REPLICAS)] for _ in names]
    for replica, name in enumerate(names):
        blocks = pack([*shared, *own[replica]])
        chooser.apply_report(name, report(rng, replica, 0, device=blocks, is_snapshot=True, cost=COST))
    assert len(chooser._index) >= NUM_BLOCKS
    gc.collect()
    gc.freeze()  # as an ingress that has run for long: nothing of it is looked at again
    times: dict[str, list[float]] = {"choice": [], "choice_cpu": [], "report": []}
    held: deque[Reservation] = deque()
    for number in range(num_calls):
        replica = number % NUM_REPLICAS
        went, own[replica][:16] = own[replica][:16], [rng.randbytes(8) for _ in range(16)]
        said = report(rng, replica, 1 + number // NUM_REPLICAS, device=pack(own[replica][:16]), gone=pack(went))
        started = time.perf_counter()
        assert chooser.apply_report(names[replica], said)
        times["report"].append(time.perf_counter() - started)
        ids = (*rng.choice(systems), *(rng.randrange(32_000) for _ in range(half)))
        started, started_cpu = time.perf_counter(), time.thread_time()
        reservation = chooser.select_and_reserve(ids, session_id=f"s{rng.randrange(10 * NUM_SESSIONS)}")
        times["choice_cpu"].append(time.thread_time() - started_cpu)
        times["choice"].append(time.perf_counter() - started)
        assert reservation is not None
        held.append(reservation)
        if len(held) > 2 * NUM_REPLICAS:
            held.popleft().release()
    gc.unfreeze()
    found = {}
    for name, values in times.items():
        found[f"{name}_p50_ms"] = statistics.median(values) * 1e3
        found[f"{name}_p99_ms"] = statistics.quantiles(values, n=100)[98] * 1e3
    return found


def deploy() -> dict[str, Any]:
    """One no-op application per router; their handles."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    class NoOp:
        async def call(self, method: str, requests: Sequence[Any], **_: str) -> list[None]:
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
    call = handle.options(method_name="call", _by_reference=False)
    return lambda request: call.options(session_id=request.session_id).remote(method="submit_many", requests=[request])


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
    parser.add_argument("--choices", action="store_true", help="no calls: what the chooser does alone")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    args = parser.parse_args()
    num_calls = 400 if args.quick else 2000
    run = Run("router", args, calls=num_calls, prompt_tokens=PROMPT_TOKENS)
    chosen = choices(num_calls)
    for name in ("choice", "choice_cpu", "report"):
        run.say(f"{name:16} p50 {chosen[f'{name}_p50_ms']:.3f} ms  p99 {chosen[f'{name}_p99_ms']:.3f} ms")
    times = {} if args.choices else measure(num_calls)
    p50 = {arm: statistics.median(values) for arm, values in times.items()}
    p99 = {arm: statistics.quantiles(values, n=100)[98] for arm, values in times.items()}
    for arm in times:
        run.say(f"{arm:16} p50 {p50[arm]:.2f} ms  p99 {p99[arm]:.2f} ms")
    added = p50[OURS] - min(ms for arm, ms in p50.items() if arm != OURS) if p50 else None
    run.check(at_most("added_p50", added, ADDED_P50_TARGET_MS, "ms"))
    run.check(at_most("choice_p50", chosen["choice_p50_ms"], CHOICE_P50_TARGET_MS, "ms"))
    run.check(at_most("choice_p99", chosen["choice_cpu_p99_ms"], CHOICE_P99_TARGET_MS, "ms"))
    run.end({"p50_ms": p50, "p99_ms": p99, **chosen})


if __name__ == "__main__":
    main()
