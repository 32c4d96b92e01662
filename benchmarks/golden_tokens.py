"""Tokens of a fixed set of requests, kept as JSON: a change of shape must not change one of them.

    python benchmarks/golden_tokens.py --write FILE
    python benchmarks/golden_tokens.py --check FILE

Through the public `LLM` alone, so that the same script runs on the tree before a change and on the one after it; on
one machine, as products of other widths round otherwise. mneme-tiny in float32; requests alternate between greedy ones
and sampled ones with seeds and penalties. W, S and P are those of `workloads.py` with prompts of a quarter of the
length; sessions have 5 turns each; in `truncation` a session outgrows its window under each policy; in `pressure` the
pool holds a third of what runs; in `tier` a second engine begins with what the first one left on the disk. Also kept:
how many prompt tokens were cached.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from workloads import WORKLOADS, Workload

from mneme import LLM, SamplingParams

_FIRST_ID, _LAST_ID = 300, 1000  # ids of plain text in mneme-tiny's vocabulary
_TURNS = ("hello there", "what is a tree?", "and a forest?", "say that again", "thank you")
_TRUNCATIONS: tuple[dict[str, Any], ...] = (
    {"strategy": "reuse_kv", "ratio": 0.5},
    {"strategy": "recompute", "ratio": 0.5},
    {"strategy": "reuse_kv", "ratio": 0.25, "keep_first": 4},
    {"strategy": "reuse_kv", "ratio": 0.5, "keep": "important"},
)

Answer = dict[str, Any]


def make_llm(**config: Any) -> LLM:
    cache = config.pop("cache", None)
    return LLM("mneme-tiny", device="cpu", dtype="float32", config=config, cache=cache)


def params_of(number: int, num_new: int) -> SamplingParams:
    common: dict[str, Any] = {"max_tokens": num_new, "ignore_eos": True}
    if number % 2 == 0:
        return SamplingParams(temperature=0, **common)
    sampled: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": number}
    return SamplingParams(**common, **sampled, presence_penalty=0.3, repetition_penalty=1.1)


def answers(outputs: Sequence[Any]) -> list[Answer]:
    return [{"ids": list(out.outputs[0].token_ids), "cached": out.metrics.cached_tokens} for out in outputs]


def draw(generator: random.Random, num: int) -> list[int]:
    return [generator.randrange(_FIRST_ID, _LAST_ID) for _ in range(num)]


def workload(llm: LLM, work: Workload) -> list[Answer]:
    """Cold, then the same once more: the second time prompts are cached."""
    generator = random.Random(work.num_private)
    shared = draw(generator, work.num_shared)
    prompts = [shared + draw(generator, work.num_private) for _ in range(work.num_requests)]
    params = [params_of(number, work.num_new) for number in range(work.num_requests)]
    return [each for _ in range(2) for each in answers(llm.generate(prompts, params))]


def sessions(llm: LLM, num: int = 6, truncation: dict[str, Any] | None = None) -> list[Answer]:
    """`num` conversations at once; each turn resends its history, as clients do."""
    found: list[Answer] = []
    histories: list[list[int]] = [[] for _ in range(num)]
    names = [f"s{number}" for number in range(num)]
    for turn, text in enumerate(_TURNS):
        for number, history in enumerate(histories):
            said = f" {text} {number}" * (1 + number)
            history += llm.get_tokenizer().encode(said, add_special_tokens=False)
        params = [params_of(number + turn, 24) for number in range(num)]
        found += answers(llm.generate(histories, params, session_ids=names, truncation=truncation))
        for history, answer in zip(histories, found[-num:], strict=True):
            history += answer["ids"]
    return found


def tier() -> list[Answer]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        cache = {"chunk_tokens": 64, "load": "always", "disk": {"folder": folder, "capacity_bytes": 1 << 30}}
        for _ in range(2):
            with make_llm(cache=cache) as llm:
                found += workload(llm, Workload(6, 128, 100, 16))[:6]
    return found


def golden() -> dict[str, list[Answer]]:
    sets: dict[str, list[Answer]] = {}
    for name in ("W", "S", "P"):
        work = WORKLOADS[name]
        with make_llm() as llm:
            quarter = work._replace(num_shared=work.num_shared // 4, num_private=work.num_private // 4)
            sets[name] = workload(llm, quarter)
    with make_llm() as llm:
        sets["sessions"] = sessions(llm)
    for number, truncation in enumerate(_TRUNCATIONS):
        with make_llm(max_context=128) as llm:
            sets[f"truncation {number}"] = sessions(llm, truncation=truncation)
    with make_llm(kv_cache_bytes=4 << 20) as llm:
        sets["pressure"] = workload(llm, Workload(24, 64, 200, 40))
    sets["tier"] = tier()
    return sets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", type=Path, metavar="FILE")
    mode.add_argument("--check", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = golden()
    if args.write:
        args.write.write_text(json.dumps(found, separators=(",", ":")) + "\n")
        print(f"wrote {sum(map(len, found.values()))} answers of {len(found)} sets")
        return
    kept = json.loads(args.check.read_text())
    wrong = [f"{name}[{n}]" for name in kept for n, each in enumerate(kept[name]) if found[name][n] != each]
    print(f"{sum(map(len, kept.values()))} answers of {len(kept)} sets, {len(wrong)} differ {wrong[:8]}")
    sys.exit(1 if wrong or kept.keys() != found.keys() else 0)


if __name__ == "__main__":
    main()
