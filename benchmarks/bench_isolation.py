"""Whether one tenant's times tell what another tenant has said: times to the first token, by the KS test.

    python benchmarks/bench_isolation.py [--quick] [--samples 400] [--tokens 256] [--http]

Tenant A says a prompt. Then tenant B asks for one token behind the same prompt (`said`), and behind another of the
same length that nobody has said (`unsaid`); in every round these two come in an order that is drawn. If B's times had
anything of A's prompts in them, the two distributions would differ. `own` shows that the test could tell: A asks for
its prompt again. No two prompts begin with the same token.

What bounds it: the prefill of `--tokens` tokens by one thread, and the noise of the machine, which lands on both arms.
Embedded model, one engine, float32; the closing line has p-values, medians and cached tokens. With `--http` the tenants
are two API keys of `mneme serve` with one replica, and times are to the first event of a stream.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: compiled kernels read it once

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from harness import Run, at_least, at_most, options_of
from streams import stream

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.build import build_engine
from mneme.replicas.request import GenerationRequest, SamplingParams
from tests.e2e.server_process import SERVE, ServerProcess, free_port

KEYS = {"a": "key-of-tenant-a-0123", "b": "key-of-tenant-b-0123"}
# Of a request's name, its tenant and its prompt's ids: seconds to the first token, and cached tokens of the prompt.
Ask = Callable[[str, str, Sequence[int]], tuple[float, int]]
ONE = SamplingParams(max_tokens=1, temperature=0, seed=0, ignore_eos=True)


def ks_p_value(one: Sequence[float], other: Sequence[float]) -> float:
    """The two-sample Kolmogorov-Smirnov test's p-value, by its asymptotic distribution (Numerical Recipes, 14.3)."""
    low, high = sorted(one), sorted(other)
    distance, i, j = 0.0, 0, 0
    while i < len(low) and j < len(high):
        value = min(low[i], high[j])
        while i < len(low) and low[i] <= value:
            i += 1
        while j < len(high) and high[j] <= value:
            j += 1
        distance = max(distance, abs(i / len(low) - j / len(high)))
    effective = math.sqrt(len(low) * len(high) / (len(low) + len(high)))
    scaled = (effective + 0.12 + 0.11 / effective) * distance
    if scaled < 0.2:  # the series does not converge there, and is 1
        return 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * sum(terms)))


def in_process() -> Ask:
    """Ask an engine of this process."""
    engine = build_engine("mneme-tiny", EngineConfig(dtype="float32", device="cpu", num_pages=1024))

    def ask(name: str, tenant: str, ids: Sequence[int]) -> tuple[float, int]:
        request = GenerationRequest(request_id=name, prompt_token_ids=tuple(ids), sampling=ONE, salt=tenant)
        started_s, cached = time.perf_counter(), -1
        engine.submit(request)
        while cached < 0:
            cached = next((event.usage.cached_tokens for event in engine.step() if event.usage is not None), -1)
        seconds = time.perf_counter() - started_s
        while engine.has_work:
            engine.step()
        return seconds, cached

    return ask


def over_http(opened: ExitStack) -> Ask:
    """Ask a server of its own, which ends with `opened`."""
    settings = f"http.api_keys=[{','.join(KEYS.values())}]", "engine.dtype=float32", "engine.num_pages=1024"
    options = [part for setting in settings for part in ("--set", setting)]
    server = ServerProcess([*SERVE, "mneme-tiny", "--replicas", "1", "--port", str(free_port()), *options])
    opened.callback(server.discard)
    client = opened.enter_context(httpx.Client(base_url=server.await_ready(), timeout=60))

    def ask(name: str, tenant: str, ids: Sequence[int]) -> tuple[float, int]:
        body = {"model": "mneme-tiny", "prompt": list(ids), "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        headers = {"authorization": f"Bearer {KEYS[tenant]}", "x-request-id": name}
        heard = stream(client, "/v1/completions", body, headers=headers)
        return heard.first_s, heard.usage["prompt_tokens_details"]["cached_tokens"]

    return ask


def main() -> int:
    parser = options_of(__doc__, quick="200 samples of 64 tokens")
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--http", action="store_true", help="over HTTP, by two API keys")
    args = parser.parse_args()
    if args.quick:
        args.samples, args.tokens = 200, 64
    run = Run(
        "isolation",
        args,
        threads=1,
        model="mneme-tiny",
        samples=args.samples,
        tokens=args.tokens,
        over_http=args.http,
    )
    with ExitStack() as opened:
        measure(run, over_http(opened) if args.http else in_process())
    return 0


def measure(run: Run, ask: Ask) -> None:
    args, drawn = run.args, random.Random(run.args.seed)
    times: dict[str, list[float]] = {"said": [], "unsaid": [], "own": []}
    cached = dict.fromkeys(times, 0)

    firsts = itertools.count(300)

    def prompt() -> list[int]:
        return [next(firsts), *(drawn.randrange(300, 1000) for _ in range(args.tokens - 1))]

    for number in range(-10, args.samples):  # those below 0 are not counted
        said, unsaid = prompt(), prompt()
        ask(f"a-{number}", "a", said)
        arms = [("said", "b", said), ("unsaid", "b", unsaid)]
        drawn.shuffle(arms)
        for name, salt, ids in [*arms, ("own", "a", said)]:
            seconds, num_cached = ask(f"{name}-{number}", salt, ids)
            if number >= 0:
                times[name].append(seconds)
                cached[name] += num_cached
    p_others, p_own = ks_p_value(times["said"], times["unsaid"]), ks_p_value(times["own"], times["unsaid"])
    results = {
        "p_said_unsaid": p_others,
        "p_own_unsaid": p_own,
        "median_ms": {name: 1e3 * statistics.median(found) for name, found in times.items()},
        "cached_tokens": cached,
    }
    run.say(f"medians, ms: {results['median_ms']}; p = {p_others:.3f} of another's prompts, {p_own:.2g} of one's own")
    run.check(
        at_least("p_of_another_tenants_prompts", p_others, 0.01, unit="p"),
        at_most("cached_tokens_of_another_tenant", cached["said"] + cached["unsaid"], 0, unit="tokens"),
        at_most("p_of_ones_own_prompts", p_own, 0.01, unit="p"),
    )
    run.end(results)


if __name__ == "__main__":
    sys.exit(main())
