"""Output tokens per second of our engine and of `transformers` `generate`: same weights, same prompts, one run.

    python benchmarks/bench_engine.py [--quick] [--workload W] [--alone] [--int8-kv] [--runs 5] [--json FILE]

What bounds it: on one CPU core a decode step reads every weight once (26M of the 31M parameters: 52 MB in bfloat16,
104 MB in float32), and the prefill is one matrix product of 2 x 26M flops per computed token. Sharing takes the shared
prefix out of every request's prefill but one.

Timed from the first submission to the last token, from an empty cache, one thread each, arms interleaved in turns,
medians. Our pool is allocated beforehand, as a server's is; `generate` allocates its cache as it goes.
`generate` gets what it is best at: one padded-free batch of equal lengths, its own KV cache, `torch.inference_mode`.
With `--beside PYTHON` (of an environment with vLLM's CPU build, `peers/vllm_cpu.py`) that takes two turns in every
round, as it comes (compiled, blocks of its own choice) and eager. Tokens a CPU-second are of all threads of a process.
With `--int8-kv` an engine of ours whose KV has 8 bits takes a turn in every round too, cold and warm.
`bench_real_chat.py` has llama.cpp beside both, served.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import Check, Run, at_least, cpu_flags, options_of
from peers.beside import Peer
from random_models import PAGE_SIZE, request
from workloads import MODEL_SHAPE, WORKLOADS, Workload, make_prompts, write_random_llama

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.build import choose_kernels
from mneme.replicas.engine.choice import machine_choice
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.directory import load_model_config
from mneme.replicas.model.runner import Runner
from mneme.replicas.model.weights import load_weights

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TARGETS = {"bfloat16": 4.0, "float32": 3.0}  # times `generate`, workload W
WARM_TARGETS = {"bfloat16": 10.0, "float32": 4.0}
INT8_KV_TARGETS = {"P": 1.6, "L": 1.6}  # times the same engine with KV of the model's dtype, both warm
PEER_TARGETS = {"W": 1.2, "S": 2.0, "P": 1.2}  # times vLLM's CPU build, both warm


class Took(NamedTuple):
    """Seconds, and those of CPUs in all threads of this process."""

    wall_s: float
    cpu_s: float

    @staticmethod
    def now() -> Took:
        return Took(time.perf_counter(), time.process_time())

    @staticmethod
    def since(started: Took) -> Took:
        return Took(time.perf_counter() - started.wall_s, time.process_time() - started.cpu_s)


class Ours:
    """Our engine; `run` starts from an empty cache, `run_warm` after the same prompts were run once."""

    def __init__(
        self, directory: Path, dtype: torch.dtype, workload: Workload, kv_dtype: torch.dtype | None = None
    ) -> None:
        config = load_model_config(directory)
        kernels = choose_kernels("auto", torch.device("cpu"), dtype)
        weights = load_weights(directory, config, torch.device("cpu"), dtype, torch_rows=kernels.product_rows)
        tokens = workload.num_shared + workload.num_requests * (workload.num_private + workload.num_new)
        num_pages = tokens // PAGE_SIZE + 4 * workload.num_requests + 8
        self._runner = Runner(Decoder(config, weights, kernels=kernels), num_pages, PAGE_SIZE, kv_dtype=kv_dtype)
        self._workload = workload

    def run(self, prompts: list[list[int]]) -> Took:
        """From the first submission to the last token."""
        self._engine = Engine(self._runner, None, EngineConfig())
        elapsed = self._timed(prompts)
        assert self._engine.num_tokens["cached"] >= (self._workload.num_requests - 1) * self._workload.num_shared
        return elapsed

    def run_warm(self, prompts: list[list[int]]) -> Took:
        """The same prompts again: all of each but its last token is cached."""
        before = self._engine.num_tokens["cached"]
        elapsed = self._timed(prompts)
        assert self._engine.num_tokens["cached"] - before == sum(len(ids) - 1 for ids in prompts)
        return elapsed

    def _timed(self, prompts: list[list[int]]) -> Took:
        engine = self._engine
        before = engine.num_tokens["generated"]
        started = Took.now()
        for index, ids in enumerate(prompts):
            engine.submit(request(str(index), ids, self._workload.num_new))
        while engine.has_work:
            engine.step()
        elapsed = Took.since(started)
        assert engine.num_tokens["generated"] - before == self._workload.output_tokens
        return elapsed


class Transformers:
    """`generate` of `transformers`, which batches but does not share."""

    def __init__(self, directory: Path, dtype: torch.dtype, workload: Workload) -> None:
        from transformers import LlamaForCausalLM

        self._model = LlamaForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        self._num_new = workload.num_new

    @torch.inference_mode()
    def run(self, prompts: list[list[int]]) -> Took:
        """One `generate` call over the whole batch."""
        batch = torch.tensor(prompts)
        mask = torch.ones_like(batch)
        started = Took.now()
        out = self._model.generate(
            batch,
            attention_mask=mask,
            max_new_tokens=self._num_new,
            min_new_tokens=self._num_new,
            do_sample=False,
            pad_token_id=0,
        )
        elapsed = Took.since(started)
        assert out.shape[1] == batch.shape[1] + self._num_new
        return elapsed


def measure(
    name: str,
    workload: Workload,
    directory: Path,
    num_runs: int,
    arms: dict[str, Callable[..., Any]],
    beside: list[Peer],
) -> dict[str, Any]:
    """Medians of tokens per second by arm, and the ratio of the medians; peers take their turn in every round."""
    built = {arm: make(directory, DTYPES[name], workload) for arm, make in arms.items()}
    names = (*arms, *(f"{arm}_warm" for arm in built if isinstance(built[arm], Ours)))
    seconds: dict[str, list[float]] = {arm: [] for arm in names}
    cpu_seconds: dict[str, list[float]] = {arm: [] for arm in names}
    for run in range(num_runs + 1):
        prompts = make_prompts(workload, seed=run)
        order = list(built) if run % 2 else list(reversed(built))
        timed = {arm: built[arm].run(prompts) for arm in order}
        timed |= {f"{arm}_warm": built[arm].run_warm(prompts) for arm in order if isinstance(built[arm], Ours)}
        for arm, elapsed in timed.items() if run else ():  # the first is a warm-up
            seconds[arm].append(elapsed.wall_s)
            cpu_seconds[arm].append(elapsed.cpu_s)
        for peer in beside:
            peer.run(run, is_counted=run > 0)
    for peer in beside:
        for kind in ("cold", "warm"):
            arm = f"{peer.identity['name']}_{kind}"
            seconds[arm], cpu_seconds[arm] = peer.seconds[f"{kind}_s"], peer.seconds[f"{kind}_cpu_s"]
    rates = {arm: workload.output_tokens / statistics.median(values) for arm, values in seconds.items()}
    cpu_rates = {arm: workload.output_tokens / statistics.median(values) for arm, values in cpu_seconds.items()}
    baseline = rates.get("transformers")
    return {
        "tokens_per_s": {arm: round(rate, 1) for arm, rate in rates.items()},
        "tokens_per_cpu_s": {arm: round(rate, 1) for arm, rate in cpu_rates.items()},
        "sides": {"mneme": {"kernels": str(machine_choice()), "instructions": cpu_flags()}}
        | {peer.identity["name"]: peer.identity for peer in beside},
        "ratio": baseline and round(rates["mneme"] / baseline, 2),
        "seconds": {arm: [round(value, 3) for value in values] for arm, values in seconds.items()},
    }


def print_table(results: dict[str, Any]) -> None:
    print(f"{'dtype':<10}{'mneme':>10}{'transformers':>14}{'ratio':>8}{'mneme warm':>12}   output tokens/s, medians")
    for name, result in results.items():
        rates = result["tokens_per_s"]
        theirs, ratio = rates.get("transformers", "-"), result["ratio"] or "-"
        print(f"{name:<10}{rates['mneme']:>10}{theirs:>14}{ratio:>8}{rates['mneme_warm']:>12}")
        for arm, rate in rates.items():
            over, of_cpu = rates["mneme_warm" if arm.endswith("_warm") else "mneme"] / rate, result["tokens_per_cpu_s"]
            print(f"  {arm:<18}{rate:>9} tokens/s{of_cpu[arm]:>9} a CPU-second; ours over it {over:.2f}")
        for side, about in result["sides"].items():
            print(f"  {side}: {about}")


def checks_of(workload: str, results: dict[str, dict[str, Any]]) -> list[Check]:
    """All that is promised; an arm, dtype or workload that did not run leaves its figures without a value."""
    promised = [("W", "mneme", "transformers", dtype, target) for dtype, target in TARGETS.items()]
    promised += [("W", "mneme_warm", "transformers", dtype, target) for dtype, target in WARM_TARGETS.items()]
    promised += [(name, "mneme_warm", "vllm_warm", "bfloat16", target) for name, target in PEER_TARGETS.items()]
    promised += [
        (name, "mneme_int8_kv_warm", "mneme_warm", "bfloat16", target) for name, target in INT8_KV_TARGETS.items()
    ]
    checks = []
    for name, ours, theirs, dtype, target in promised:
        rates = results[dtype]["tokens_per_s"] if name == workload and dtype in results else {}
        ratio = rates[ours] / rates[theirs] if ours in rates and theirs in rates else None
        checks.append(at_least(f"{name}_{ours}_over_{theirs}_{dtype}", ratio, target))
    return checks


def main() -> None:
    parser = options_of(__doc__, quick="two runs of workload W", seed=False)
    parser.add_argument("--workload", choices=WORKLOADS, default="W")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="only our engine: S and P take `generate` minutes a run")
    parser.add_argument("--int8-kv", action="store_true", help="an arm whose KV has 8 bits")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument("--beside", metavar="PYTHON", help="of an environment with vLLM's CPU build, which takes turns")
    parser.add_argument("--json", type=Path, help="also write the closing line to this file")
    args = parser.parse_args()
    name, num_runs = ("W", 2) if args.quick else (args.workload, args.runs)
    workload = WORKLOADS[name]
    run = Run("engine", args, threads=1, seed=1, model=MODEL_SHAPE, workload=name, workload_shape=workload._asdict(),
              runs=num_runs)  # fmt: skip
    arms: dict[str, Callable[..., Any]] = (
        {"mneme": Ours} if args.alone else {"mneme": Ours, "transformers": Transformers}
    )
    arms |= {"mneme_int8_kv": partial(Ours, kv_dtype=torch.int8)} if args.int8_kv else {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = write_random_llama(Path(scratch))
        beside = [Peer(args.beside, name, *options) for options in ((), ("--eager",))] if args.beside else []
        dtypes = args.dtype or (["bfloat16"] if beside else list(DTYPES))
        results = {dtype: measure(dtype, workload, directory, num_runs, arms, beside) for dtype in dtypes}
        for peer in beside:
            peer.stop()
    print_table(results)
    run.check(*checks_of(name, results))
    run.end(results)


if __name__ == "__main__":
    main()
