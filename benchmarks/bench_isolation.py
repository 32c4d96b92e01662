"""Whether one tenant's times tell what another tenant has said: times to the first token, by the KS test.

    python benchmarks/bench_isolation.py [--quick] [--samples 400] [--tokens 256]

Tenant A says a prompt. Then tenant B asks for one token behind the same prompt (`said`), and behind another of the
same length that nobody has said (`unsaid`); in every round these two come in an order that is drawn. If B's times had
anything of A's prompts in them, the two distributions would differ. `own` shows that the test could tell: A asks for
its prompt again. No two prompts begin with the same token.

What bounds it: the prefill of `--tokens` tokens by one thread, and the noise of the machine, which lands on both arms.
Embedded model, one engine, float32; the closing line has p-values, medians and cached tokens.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: compiled kernels read it once

from harness import Run, at_least, at_most, options_of

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.load import load_engine
from mneme.replicas.request import GenerationRequest, SamplingParams

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


def ask(engine: Engine, name: str, salt: str, ids: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens of the prompt were cached."""
    request = GenerationRequest(request_id=name, prompt_token_ids=tuple(ids), sampling=ONE, salt=salt)
    started_s, cached = time.perf_counter(), -1
    engine.submit(request)
    while cached < 0:
        cached = next((event.usage.cached_tokens for event in engine.step() if event.usage is not None), -1)
    seconds = time.perf_counter() - started_s
    while engine.has_work:
        engine.step()
    return seconds, cached


def main() -> int:
    parser = options_of(__doc__, quick="200 samples of 64 tokens")
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    if args.quick:
        args.samples, args.tokens = 200, 64
    run = Run("isolation", args, threads=1, model="mneme-tiny", samples=args.samples, tokens=args.tokens)
    drawn = random.Random(args.seed)
    engine = load_engine("mneme-tiny", EngineConfig(dtype="float32", device="cpu", num_pages=1024))
    times: dict[str, list[float]] = {"said": [], "unsaid": [], "own": []}
    cached = dict.fromkeys(times, 0)

    firsts = itertools.count(300)

    def prompt() -> list[int]:
        return [next(firsts), *(drawn.randrange(300, 1000) for _ in range(args.tokens - 1))]

    for number in range(-10, args.samples):  # those below 0 are not counted
        said, unsaid = prompt(), prompt()
        ask(engine, f"a-{number}", "a", said)
        arms = [("said", "b", said), ("unsaid", "b", unsaid)]
        drawn.shuffle(arms)
        for name, salt, ids in [*arms, ("own", "a", said)]:
            seconds, num_cached = ask(engine, f"{name}-{number}", salt, ids)
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
