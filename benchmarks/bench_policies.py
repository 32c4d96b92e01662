"""Our router against simple rules on one cluster: real replicas, sessions and shared prompts and documents together.

    python benchmarks/bench_policies.py [--quick] [--rounds 3] [--rate 3] [--replicas 3] [--no-tier] [--out FOLDER]

`mneme serve` with `router.policy` of each arm in turn, everything else the same: 3 replicas of a random 31M Llama
(mneme-tiny's tokenizer, bfloat16, one thread each), a server anew for every run, so that all caches are cold. Load is
`mneme bench serve`'s, open loop: a third of the requests are turns of sessions behind six system prompts, which send
their history back and name their session; a third single questions behind those prompts, a third questions behind
4 of 24 documents. Poisson, the same texts at the same times for every arm, arms forwards and backwards in alternation.
`hit` is what servers say was cached, `one cache` what a single replica with the same requests finds (all fits there).
`skew` is the most tokens computed by a replica over the mean. Ratios are of the same round, ours over the other's.
Rules of other systems are compared in the simulator (bench_simulated_cluster.py).
Bound: three engines, ingress and the client share the cores, so a replica's speed depends on the others'.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from harness import PartResult, Run, at_least, at_most, median_ratio, options_of, take_turns  # noqa: E402
from workloads import write_chat_llama  # noqa: E402

from mneme.lab.bench.client import ChatClient, connect  # noqa: E402
from mneme.lab.bench.load import Load  # noqa: E402
from mneme.lab.bench.measure import summarize  # noqa: E402
from mneme.lab.bench.workloads import Session, Shape, arrive, make_sessions  # noqa: E402
from tests.e2e.server_process import SERVE, ServerProcess, free_port  # noqa: E402

OURS, ONE = "mneme", "one cache"
OTHERS = ("least-loaded", "hash", "random")
PARTS = {
    "sessions": Shape(turns=5, words=48, prefix_words=400, prefixes=6, max_tokens=24),
    "shared-prefix": Shape(words=48, prefix_words=400, prefixes=6, max_tokens=24),
    "rag": Shape(words=24, documents=4, pool=24, document_words=120, max_tokens=24),
}
THINK_S = 2.0


def sessions_of(num_requests: int, rate: float, seed: int) -> list[Session]:
    """All that clients ask, with times."""
    found = []
    for number, (name, shape) in enumerate(PARTS.items()):
        share = num_requests // len(PARTS)
        found += arrive(make_sessions(name, shape, share, seed), rate / len(PARTS), THINK_S, seed + number)
    return found


async def ask(url: str, sessions: list[Session]) -> dict[str, Any]:
    async with connect(url) as http:
        options = {"model": "llama-31m", "temperature": 0, "ignore_eos": True}
        client = ChatClient(http, options, session_header=False, timeout_s=300)
        named = ChatClient(http, options, session_header=True, timeout_s=300)
        of_sessions = [each for each in sessions if each.name.startswith("sessions")]
        others = [each for each in sessions if not each.name.startswith("sessions")]
        loads = Load(named.ask), Load(client.ask)
        await asyncio.gather(loads[0].play(of_sessions), loads[1].play(others))
        answers = [answer for load in loads for answer in load.answers]
        stats = (await http.get("/v1/kv/stats")).raise_for_status().json()["replicas"]
    return {**summarize(answers, {}, sum(load.num_unsent for load in loads)), "stats": stats}


def computed_tokens(stats: dict[str, Any]) -> list[float]:
    """Tokens that each replica has computed."""
    return [each["tokens"]["prompt"] - each["tokens"]["cached"] + each["tokens"]["generated"] for each in stats]


def main() -> None:
    parser = options_of(__doc__, quick="two arms, a round, 24 requests", out=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--others", nargs="+", default=list(OTHERS))
    parser.add_argument("--no-tier", action="store_true", help="replicas share no cache")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.requests, args.others = 1, 24, args.others[:1]
    run = Run("policies", args, model="llama-31m", replicas=args.replicas, rate=args.rate, requests=args.requests,
              has_tier=not args.no_tier)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = write_chat_llama(Path(folder) / "llama-31m")
        arms = (OURS, *args.others, ONE)
        turns = itertools.count()

        def take(arm: str) -> dict[str, Any]:
            seed = args.seed + next(turns) // len(arms)  # each round's own
            return take_arm(model, arm, args, sessions_of(args.requests, args.rate, seed))

        found = take_turns(arms, take, args.rounds, num_warm=0)
    part = result_of(found)
    run.show(part)
    run.end({"policies": part.rows})


def take_arm(model: Path, arm: str, args: Any, sessions: list[Session]) -> dict[str, Any]:
    options = ["engine.num_threads=1", "engine.dtype=bfloat16", f"port={free_port()}"]
    options += [f"replicas={1 if arm == ONE else args.replicas}", f"router.policy={OURS if arm == ONE else arm}"]
    options += ["cache.enabled=false"] if args.no_tier or arm == ONE else []
    settings = [part for option in options for part in ("--set", option)]
    server = ServerProcess((*SERVE, str(model), *settings), OMP_NUM_THREADS="1")
    try:
        found = asyncio.run(ask(server.await_ready(), sessions))
        server.stop()
        return found
    finally:
        server.discard()


def result_of(found: dict[str, list[dict[str, Any]]]) -> PartResult:
    def figures(arm: str, *path: str) -> list[float]:
        values: list[Any] = found[arm]
        for key in path:
            values = [value[key] for value in values]
        return values

    rows, checks = [], []
    one = statistics.median(figures(ONE, "cached_share"))
    for arm in found:
        skews = [max(each) / statistics.mean(each) for each in map(computed_tokens, figures(arm, "stats"))]
        row: dict[str, Any] = {"arm": arm, "failed": sum(int(n) for n in figures(arm, "num_failed"))}
        for name, path in {"TTFT p50 ms": ("ttft_ms", "p50"), "TTFT p90 ms": ("ttft_ms", "p90"),
                           "ITL p50 ms": ("itl_ms", "p50"), "ITL p99 ms": ("itl_ms", "p99")}.items():  # fmt: skip
            row[name] = statistics.median(figures(arm, *path))
        row |= {"hit": statistics.median(figures(arm, "cached_share")), "skew": statistics.median(skews)}
        rows.append(row)
        if arm in (OURS, ONE):
            continue
        for percent in ("p50", "p90"):
            ratio = median_ratio(figures(OURS, "ttft_ms", percent), figures(arm, "ttft_ms", percent))
            row[f"ours/its TTFT {percent}"] = ratio
            checks.append(at_most(f"ttft_{percent}_of_{arm}", ratio, 0.7))
        for percent in ("p50", "p99"):
            ratio = median_ratio(figures(OURS, "itl_ms", percent), figures(arm, "itl_ms", percent))
            row[f"ours/its ITL {percent}"] = ratio
            checks.append(at_most(f"itl_{percent}_of_{arm}", ratio, 1.07))
    checks += [
        at_least("hit_ratio_minus_one_cache", rows[0]["hit"] - one, -0.03, ""),
        at_most("most_over_mean_load", rows[0]["skew"], 1.25),
        at_most("failed", rows[0]["failed"], 0, "requests"),
    ]
    return PartResult(name="policies", title="one cluster, routed by each rule", rows=rows, checks=checks)


if __name__ == "__main__":
    main()
