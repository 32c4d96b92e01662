"""The engine alone, with random weights: decode tokens/s, time to the first token, share of the bandwidth floor.

    python benchmarks/bench_gpu_engine.py [--device cuda|cpu] [--model NAME] [--quick] [--out FOLDER]

No files, no tokenizer, no Ray: token ids go into `Engine`, over `Runner` and `Decoder`. Weights are made on the device
in the shapes of Llama-2-7B, Llama-3-8B, Mistral-7B, and Phi-2's dimensions in the Llama layout (random_models.py).

What bounds it: a decode step reads every weight but the embedding, and every distinct token's KV, once. The floor is
those bytes over the measured copy bandwidth; a step's share of the floor is the floor over its measured time. The
time to the first token is held against reading the weights once, or 2 flops per weight of the layers and token at the
measured matrix rate, whichever takes longer.

`private`: prompts that have nothing in common; `shared`: a system prompt and a few tokens of each request's own.
Steps are timed one by one once all requests decode; the median counts. Greedy, ends ignored. The seed and the load
average are stated; the run ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from attention.machine import Ceilings, measure_ceilings
from attention.report import NOT_RUN, PartResult, closing_checks, print_part, rounded
from attention.suite import device_name
from plots import Draw, caption_of, lines, save
from random_models import SHAPES, head_weights, kv_bytes_per_token, layer_weights, model_config, random_weights
from workloads import load_average

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.graphs import decode_graphs_for
from mneme.replicas.model.runner import Runner
from mneme.replicas.request import GenerationRequest, SamplingParams

PAGE_SIZE = 32
MODELS = ("llama-2-7b", "llama-3-8b", "mistral-7b", "phi-2-sized")
QUICK_MODELS = ("llama-31m",)
_WARM_STEPS = 4  # after the last prefill: the first decode steps of a batch size may compile and record
_SPARE_PAGES = 64


class Prompts(NamedTuple):
    name: str
    shared: int
    private: int


class Grid(NamedTuple):
    batches: tuple[int, ...]
    prompts: tuple[Prompts, ...]
    ttft_lengths: tuple[int, ...]
    num_steps: int  # timed, of each decode batch


FULL = Grid((1, 8, 32, 128), (Prompts("private", 0, 512), Prompts("shared", 2048, 64)), (128, 1024, 3840), 24)
QUICK = Grid((1, 4), (Prompts("private", 0, 64), Prompts("shared", 128, 32)), (64, 256), 6)


class Model:
    """One model with a pool that holds its largest batch."""

    def __init__(
        self, name: str, grid: Grid, device: torch.device, dtype: torch.dtype, seed: int, num_host_pages: int = 0
    ) -> None:
        self.config = model_config(name)
        self.dtype = dtype
        self._ids = torch.Generator().manual_seed(seed)
        steps = grid.num_steps + _WARM_STEPS + 2
        tokens = max(p.shared + b * (p.private + steps) for p in grid.prompts for b in grid.batches)
        num_pages = max(tokens, max(grid.ttft_lengths)) // PAGE_SIZE + 2 * max(grid.batches) + _SPARE_PAGES
        weights = random_weights(self.config, device, dtype, seed)
        decoder = Decoder(self.config, weights, max_context=4096)
        self.decoder = decoder
        graphs = decode_graphs_for(decoder, max(grid.batches))
        self.runner = Runner(decoder, num_pages, PAGE_SIZE, graphs, num_host_pages=num_host_pages)

    def decode_ms(self, batch: int, prompts: Prompts, num_steps: int) -> list[float]:
        """Times of single steps in which all `batch` requests decode."""
        engine = self.decoding(batch, prompts)
        times = []
        for _ in range(num_steps):
            started, before = time.perf_counter(), engine.num_tokens["generated"]
            engine.step()
            times.append((time.perf_counter() - started) * 1e3)
            assert engine.num_tokens["generated"] - before == batch, "every request decodes in every timed step"
        return times

    def decoding(
        self, batch: int, prompts: Prompts, *, spare: int = 0, temperature: float = 0.0, top_p: float = 1.0
    ) -> Engine:
        """An engine on which so many requests decode, warm; `spare` more may join them."""
        engine = self.engine(max_running=max(batch, 16) + spare)
        shared = self.draw(prompts.shared)
        for index in range(batch):
            ids = shared + self.draw(prompts.private)
            self.submit(engine, str(index), ids, max_tokens=1024, temperature=temperature, top_p=top_p)
        decoding: set[str] = set()
        while len(decoding) < batch:
            decoding.update(event.request_id for event in engine.step() if event.token_ids)
        for _ in range(_WARM_STEPS):
            engine.step()
        return engine

    def ttft_ms(self, length: int) -> float:
        """From submission to the first token, alone, nothing cached."""
        engine = self.engine(max_running=16)
        ids = self.draw(length)
        started = time.perf_counter()
        self.submit(engine, "0", ids, max_tokens=1)
        while not engine.num_tokens["generated"]:
            engine.step()
        return (time.perf_counter() - started) * 1e3

    def engine(self, max_running: int) -> Engine:
        return Engine(self.runner, None, EngineConfig(page_size=PAGE_SIZE, max_running=max_running, max_sessions=0))

    def submit(self, engine: Engine, request_id: str, ids: list[int], max_tokens: int, **sampling: Any) -> None:
        params = SamplingParams(**{"temperature": 0, **sampling}, max_tokens=max_tokens, ignore_eos=True, seed=0)
        engine.submit(GenerationRequest(request_id=request_id, prompt_token_ids=tuple(ids), sampling=params))

    def draw(self, count: int) -> list[int]:
        drawn: list[int] = torch.randint(16, self.config.vocab_size, (count,), generator=self._ids).tolist()
        return drawn


class Run(NamedTuple):
    """What all models of a run have in common."""

    device: torch.device
    dtype: torch.dtype
    grid: Grid
    ceilings: Ceilings
    seed: int


def measure_model(name: str, run: Run, ends_s: float) -> Iterator[dict[str, Any]]:
    """A row per prompt length and per decode batch; those that would start after `ends_s` are not run."""
    model = Model(name, run.grid, run.device, run.dtype, run.seed)

    def row(what: str, batch: int, prompt: int, measure: Callable[[], dict[str, float]]) -> dict[str, Any]:
        late = time.perf_counter() > ends_s
        found: dict[str, Any] = {"status": f"{NOT_RUN}: out of time"} if late else measure()
        return {"model": name, "what": what, "batch": batch, "prompt": prompt, **found}

    for length in run.grid.ttft_lengths:
        yield row("ttft", 1, length, partial(first_token, model, length, run))
    for prompts in run.grid.prompts:
        for batch in run.grid.batches:
            yield row(
                prompts.name, batch, prompts.shared + prompts.private, partial(_decode, model, batch, prompts, run)
            )


def first_token(model: Model, length: int, run: Run) -> dict[str, float]:
    model.ttft_ms(length)  # compiles what is new at this length
    ms = statistics.median(model.ttft_ms(length) for _ in range(3))
    flops_ms = 2e3 * layer_weights(model.config) * length / run.ceilings.flops_per_s[run.dtype]
    read_ms = weight_bytes(model) / run.ceilings.copy_bytes_per_s * 1e3
    floor_ms = max(flops_ms, read_ms)
    return {"ms": ms, "tok/s": length / ms * 1e3, "floor_ms": floor_ms, "of_floor": floor_ms / ms}


def decode_bytes(model: Model, batch: int, prompts: Prompts, num_steps: int) -> int:
    """What a decode step reads at least, in the middle of so many timed ones: weights, and distinct tokens' KV."""
    distinct = prompts.shared + batch * (prompts.private + _WARM_STEPS + num_steps // 2)
    return weight_bytes(model) + distinct * kv_bytes_per_token(model.config, model.dtype)


def _decode(model: Model, batch: int, prompts: Prompts, run: Run) -> dict[str, float]:
    ms = statistics.median(model.decode_ms(batch, prompts, run.grid.num_steps))
    floor_ms = decode_bytes(model, batch, prompts, run.grid.num_steps) / run.ceilings.copy_bytes_per_s * 1e3
    return {"ms": ms, "tok/s": batch / ms * 1e3, "floor_ms": floor_ms, "of_floor": floor_ms / ms}


def weight_bytes(model: Model) -> int:
    """What a step reads of the weights, whatever its rows."""
    return (layer_weights(model.config) + head_weights(model.config)) * model.dtype.itemsize


def measure_all(names: Sequence[str], run: Run, budget_s: float) -> list[dict[str, Any]]:
    """The models one after the other, each in an equal part of the time that is left."""
    rows: list[dict[str, Any]] = []
    ends_s = time.perf_counter() + budget_s
    for index, name in enumerate(names):
        now_s = time.perf_counter()
        try:
            rows += measure_model(name, run, now_s + (ends_s - now_s) / (len(names) - index))
        except torch.OutOfMemoryError:
            rows.append({"model": name, "status": f"{NOT_RUN}: out of memory"})
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    args = _arguments()
    device, dtype = torch.device(args.device), torch.bfloat16
    if device.type == "cpu":
        torch.set_num_threads(1)
    load_before, started = load_average(), time.perf_counter()
    grid = QUICK if args.quick else FULL
    run = Run(device, dtype, grid, measure_ceilings(device, [dtype]), args.seed)
    names = args.model or (QUICK_MODELS if args.quick else MODELS)
    rows = measure_all(names, run, args.budget_s)
    print_part(PartResult(name="engine", title=f"random weights, bfloat16, {device_name(device)}; ms", rows=rows))
    closing = {
        "benchmark": "gpu_engine", "device": device_name(device), "kind": device.type, "quick": args.quick,
        "dtype": "bfloat16", "page_size": PAGE_SIZE, "seed": args.seed, "torch": torch.__version__,
        "load_average": [load_before, load_average()], "elapsed_s": round(time.perf_counter() - started, 1),
        "copy_GB_per_s": rounded(run.ceilings.copy_bytes_per_s / 1e9),
        "TFLOP_per_s": rounded(run.ceilings.flops_per_s[dtype] / 1e12),
        "shapes": {name: SHAPES[name] for name in names}, "results": rounded(rows), **closing_checks([]),
    }  # fmt: skip
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "engine.json").write_text(json.dumps(closing) + "\n")
        draw(args.out, closing)
    print(json.dumps(closing))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=SHAPES, action="append", help="default: the four; with --quick the 31M one")
    parser.add_argument("--quick", action="store_true", help="a 31M model and short prompts: seconds on a CPU")
    parser.add_argument("--budget-s", type=float, default=150.0, help="for everything; the rest is 'not run'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for JSON and a plot")
    return parser.parse_args()


def draw(folder: Path, closing: dict[str, Any]) -> None:
    """Plot decode tokens/s over the batch size: a line per model, a panel per kind of prompts."""

    def panel(what: str) -> Draw:
        series: dict[str, list[tuple[float, float]]] = {}
        for row in closing["results"]:
            if row.get("what") == what and "tok/s" in row:
                series.setdefault(f"mneme, {row['model']}", []).append((row["batch"], row["tok/s"]))
        labels = f"requests at once, {what} prompts", "output tokens per second"
        return lambda axes: lines(axes, series, *labels, log_x=True, log_y=True)

    title = "Decoding with random weights, by the size of the batch (higher is better)"
    save(folder / "engine.png", title, caption_of(closing), panel("private"), panel("shared"), share_y=True)


if __name__ == "__main__":
    main()
