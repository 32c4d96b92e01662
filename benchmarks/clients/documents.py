"""LMCache's two document workloads, sent as document parts: `long_doc_permutator` and `rag-qa-quality`.

    python benchmarks/clients/documents.py permutator [--url URL] [--words 1000] [--permutations 10] [--out FILE]
    python benchmarks/clients/documents.py rag --url URL [--task FILE|coreference] [--cases 40] [--pad 0] [--out FILE]

Theirs send plain text, in which no server can know what a document is. Here the same prompts are chat messages with
parts `{"type": "document"}`, once for each way of reuse: `off`, `order: any`, `full_reuse`, selectors, `auto`. Each way
has a `cache_salt` of its own, so that none finds what another computed. One request is in flight.

permutator  5 contexts of `--words` words behind a system prompt of a fifth, in other orders, 128 tokens out (LMCache:
            5,000 tokens and 1,000; `--words 5000` for a model with room for it). Without `--url` a server is started
            with a random 31M Llama of 8,192 tokens of context: time alone
rag         questions about passages, as `mneme quality` reads them (dumps of MuSiQue, HotpotQA); F1 and exact match of
            what is said, time to the first token. `--pad`: words that are added to shorter passages (LMCache: to 256)
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import httpx  # noqa: E402
from clients.run import Server, describe, serving  # noqa: E402
from harness import PartResult, cpu_name, load_average, print_part  # noqa: E402

from mneme.lab.quality.measure import best_scores  # noqa: E402
from mneme.lab.quality.tasks import read_task  # noqa: E402

WORDS = ("the", "house", "on", "a", "hill", "is", "red", "and", "has", "two", "doors", "that", "nobody", "opens")
WAYS: dict[str, dict[str, Any]] = {
    "off": {"mode": "off"},
    "order any": {"mode": "off", "order": "any"},
    "full reuse": {"mode": "full_reuse"},
    "hkvd": {"mode": "selective", "selector": "hkvd"},
    "query": {"mode": "selective", "selector": "query"},
    "auto": {"mode": "auto"},
}


class Client:
    """Asks one thing after the other."""

    def __init__(self, server: Server) -> None:
        self._server, self._http = server, httpx.Client(timeout=600)

    def ask(self, way: str, max_tokens: int, **asked: Any) -> dict[str, Any]:
        """Return `ttft_ms`, `total_ms`, `text`, and the usage's `blend`; `asked` has a `prompt` or `messages`."""
        body = {
            "model": self._server.model, "temperature": 0, "max_tokens": max_tokens, "stream": True,
            "stream_options": {"include_usage": True}, "cache_salt": way,
            "blend": {"min_tokens": 1, **WAYS[way]}, **asked,
        }  # fmt: skip
        began_s, first_s, text, usage = time.perf_counter(), 0.0, "", {}
        path = "completions" if "prompt" in asked else "chat/completions"
        with self._http.stream("POST", f"{self._server.url}/v1/{path}", json=body) as answer:
            if answer.status_code != 200:
                sys.exit(f"{answer.status_code}: {answer.read().decode()}")
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    first_s = first_s or time.perf_counter() - began_s
                    text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        return {"ttft_ms": 1e3 * first_s, "total_ms": 1e3 * (time.perf_counter() - began_s), "text": text,
                "blend": usage["kv_details"].get("blend") or {}}  # fmt: skip


def shares(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Document tokens behind exact prefixes by what became of them, and why the last were as they were."""
    kinds = ("reused", "recomputed")
    sums = {f"{kind} tokens": sum(answer["blend"].get(kind) or 0 for answer in answers) for kind in kinds}
    return sums | {"why": answers[-1]["blend"].get("why")}


def permutator(client: Client, given: argparse.Namespace) -> list[dict[str, Any]]:
    rng, rows = random.Random(given.seed), []
    system = " ".join(rng.choices(WORDS, k=given.words // 5))
    contexts = [" ".join(rng.choices(WORDS, k=given.words)) for _ in range(5)]
    orders = rng.sample(list(itertools.permutations(range(5))), given.permutations)
    for way in WAYS:
        answers = []
        for order in orders:
            parts = [{"type": "document", "text": contexts[index]} for index in order]
            question = {"type": "text", "text": "\nWhat is on the hill?"}
            messages = [{"role": "system", "content": system}, {"role": "user", "content": [*parts, question]}]
            answers.append(client.ask(way, 128, messages=messages, ignore_eos=True))
        rows.append({"way": way, "first ttft ms": answers[0]["ttft_ms"],
                     "median ttft ms of the others": statistics.median(answer["ttft_ms"] for answer in answers[1:]),
                     "total s": sum(answer["total_ms"] for answer in answers) / 1e3, **shares(answers)})  # fmt: skip
    return rows


def rag(client: Client, given: argparse.Namespace) -> list[dict[str, Any]]:
    task, rows = read_task(given.task, given.cases), []
    cases = [case for each in task.cases_by_layout.values() for case in each]
    for way in WAYS:
        answers, scores = [], []
        for case in cases:
            parts: list[dict[str, Any]] = []
            for part in task.parts(case):
                missing = given.pad - len(part["text"].split()) if part["type"] == "document" else 0
                filler = " ".join(itertools.islice(itertools.cycle(WORDS), max(missing, 0)))
                parts.append(part | {"text": f"{part['text']} {filler}".rstrip(" ")})
            asked = {"messages": [{"role": "user", "content": parts}]} if task.is_chat else {"prompt": parts}
            answers.append(client.ask(way, 32, stop=["\n"], **asked))
            scores.append(best_scores(answers[-1]["text"].strip(), case.answers))
        rows.append({"way": way, "cases": len(cases), "F1": statistics.fmean(f1 for f1, _ in scores),
                     "exact": statistics.fmean(exact for _, exact in scores),
                     "median ttft ms": statistics.median(answer["ttft_ms"] for answer in answers),
                     **shares(answers)})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=("permutator", "rag"))
    parser.add_argument("--url", help="of a running server")
    parser.add_argument("--words", type=int, default=1000)
    parser.add_argument("--permutations", type=int, default=10)
    parser.add_argument("--task", default="coreference:4x8,8x4")
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--pad", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    before = load_average()
    if given.workload == "rag":
        if given.url is None:
            parser.error("rag needs --url: what a random model answers says nothing")
        server = describe(given.url.removesuffix("/"))
        rows = rag(Client(server), given)
    else:
        with serving(given.url) as server:
            rows = permutator(Client(server), given)
    for row in rows:
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    print_part(PartResult(name=given.workload, title="by how documents are reused", rows=rows))
    closing = {"workload": given.workload, "model": server.model, "device": cpu_name(),
               "load_average": [before, load_average()], "rows": rows}  # fmt: skip
    if given.out is not None:
        given.out.write_text(json.dumps(closing, indent=1) + "\n")
    print(json.dumps(closing))


if __name__ == "__main__":
    main()
