"""`make gpu-beside`: our engine and vLLM's on one card in turns: ours, vLLM, ours again.

Both have Llama-3-8B's shape in bfloat16, random weights, prompts of token ids, greedy draws and no end of text; no
claim is made on tokens. Time per token is (129 tokens - 1 token) / 128 of one batch that begins at once, for both the
same: prefills cancel, and prompts are new each time, so that none is cached but what is meant to be. vLLM has its
defaults (prefix caching, CUDA graphs, asynchronous scheduling). A ratio is ours over theirs; the second turn of ours
says how far the card drifted. Bound: as `make gpu-engine`'s decodes, the bytes of weights and KV.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from gpu.model import Model, Prompts, decode_bytes
from gpu.predictions import DATA_SHEETS
from gpu.steps import Row, Run, Step
from harness import NOT_RUN
from random_models import SHAPES

PRIVATE, SHARED = Prompts("private", 0, 512), Prompts("shared", 2048, 64)
_POINTS = tuple((PRIVATE, b) for b in (1, 32, 128, 256)) + tuple((SHARED, b) for b in (32, 128))
_AGAIN = ((PRIVATE, 32), (PRIVATE, 128), (SHARED, 128))
_LENGTHS, _TURN = (128, 1024, 3840), 64
_NUM_NEW, _NUM_RUNS = 129, 3

Batch = Callable[[list[list[int]], int], float]  # prompts at once, tokens of each answer: seconds


def steps(_is_dry: bool) -> list[Step]:
    return [
        Step("libraries", 40, {"vllm libraries": _libraries}, must_pass=True),
        Step("ours", 120, {"ours": partial(_ours, points=_POINTS, name="ours")}),
        Step("vllm", 240, {"vllm": _vllm}),
        Step("ours again", 60, {"ours again": partial(_ours, points=_AGAIN, name="ours again")}),
        Step("ratios", 5, {"ratios": _ratios}),
    ]


class Engines(NamedTuple):
    """One of the two, as it is asked."""

    name: str
    batch: Batch
    draw: Callable[[int], list[int]]


def _libraries(run: Run) -> Iterator[Row]:
    """Both libraries load, and FlashAttention 3 over pages agrees with torch: what fails here ends the run early."""
    if importlib.util.find_spec("vllm") is None:
        if run.is_dry:
            yield Row("vllm FA3 error", None, note=f"{NOT_RUN}: no vLLM here")
            return
        raise SystemExit("no vLLM here: benchmarks/gpu/carry.py packs it")
    if run.is_dry:
        return
    import vllm._C_stable_libtorch  # noqa: F401  # loads it
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    length, page = 1024, 16
    query = torch.randn(1, 32, 128, device=run.device, dtype=torch.bfloat16)
    keys, values = (
        torch.randn(length // page, page, 8, 128, device=run.device, dtype=torch.bfloat16) for _ in range(2)
    )
    numbers = partial(torch.tensor, device=run.device, dtype=torch.int32)
    found = flash_attn_varlen_func(
        query, keys, values, max_seqlen_q=1, cu_seqlens_q=numbers([0, 1]), max_seqlen_k=length, fa_version=3,
        seqused_k=numbers([length]), block_table=numbers([list(range(length // page))]), causal=True,
    )  # fmt: skip
    flat = (pages.reshape(length, 8, 128).transpose(0, 1)[None].float() for pages in (keys, values))
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None].float(), *flat, enable_gqa=True
    )
    error = float((found.float() - exact[0].transpose(0, 1)).abs().max())
    if error > 0.02:
        raise SystemExit(f"FlashAttention 3 is off by {error:.3g}")
    yield Row("vllm FA3 error", error)


def _ours(run: Run, points: tuple[tuple[Prompts, int], ...], name: str) -> Iterator[Row]:
    batches, shapes = [batch for _, batch in points], tuple(_dry(run, each) for each in (PRIVATE, SHARED))
    model = Model(
        run.pick("llama-3-8b", "llama-5m"), run.device, run.pick(torch.bfloat16, torch.float32),
        max_batch=run.pick(max(batches), 2), prompts=shapes, num_steps=2 * _NUM_NEW, longest=run.pick(4096, 64),
    )  # fmt: skip
    engine, count = model.engine(max_running=run.pick(256, 16)), iter(range(1 << 30))

    def batch(prompts: list[list[int]], num_new: int) -> float:
        began_s = time.perf_counter()
        for ids in prompts:
            model.submit(engine, str(next(count)), ids, max_tokens=num_new)
        while engine.in_flight:
            engine.step()
        return time.perf_counter() - began_s

    floors_ms = {}
    for device, sheet in DATA_SHEETS.items():
        if not run.is_dry and device in torch.cuda.get_device_name():
            for prompts, size in points:
                num_bytes = decode_bytes(model, size, prompts, _NUM_NEW)
                floors_ms[prompts, size] = num_bytes / sheet["copy"] / 1e9
    yield from _measure(run, Engines(name, batch, model.draw), points, floors_ms)


def _vllm(run: Run) -> Iterator[Row]:
    if importlib.util.find_spec("vllm") is None:
        yield Row("vllm private b1", None, note=f"{NOT_RUN}: no vLLM here")
        return
    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    os.environ.pop("OMP_NUM_THREADS", None)
    from vllm import LLM, SamplingParams, TokensPrompt

    began_s, shape = time.monotonic(), SHAPES[run.pick("llama-3-8b", "llama-5m")]
    with tempfile.TemporaryDirectory() as folder:
        about = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_act": "silu", "eos_token_id": 1}
        (Path(folder) / "config.json").write_text(json.dumps({**shape, **about, "bos_token_id": 0}))
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, seed=0, max_num_seqs=256,
            max_model_len=run.pick(8192, 512), gpu_memory_utilization=0.85,
        )  # fmt: skip
        yield Row("vllm ready", time.monotonic() - began_s, "s")
        generator = torch.Generator().manual_seed(1)

        def draw(count: int) -> list[int]:
            drawn: list[int] = torch.randint(16, shape["vocab_size"], (count,), generator=generator).tolist()
            return drawn

        def batch(prompts: list[list[int]], num_new: int) -> float:
            params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
            asked = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
            began_s = time.perf_counter()
            llm.generate(asked, params, use_tqdm=False)
            return time.perf_counter() - began_s

        yield from _measure(run, Engines("vllm", batch, draw), _POINTS, {})


def _measure(
    run: Run, engine: Engines, points: tuple[tuple[Prompts, int], ...], floors_ms: dict[tuple[Prompts, int], float]
) -> Iterator[Row]:
    num_new, num_runs = run.pick((_NUM_NEW, _NUM_RUNS), (4, 1))
    for point in points:
        prompts, size, name = (
            _dry(run, point[0]),
            run.pick(point[1], min(point[1], 2)),
            f"{engine.name} {_name(*point)}",
        )
        if run.is_late:
            yield Row(name, None, note=f"{NOT_RUN}: out of time")
            continue
        shared = engine.draw(prompts.shared)

        def took_s(tokens: int, size: int = size, shared: list[int] = shared, own: int = prompts.private) -> float:
            return engine.batch([shared + engine.draw(own) for _ in range(size)], tokens)

        took_s(num_new)  # compiles, captures, and caches what is shared
        gaps = [(took_s(num_new) - took_s(1)) / (num_new - 1) * 1e3 for _ in range(num_runs)]
        ms = statistics.median(gaps)
        yield Row(name, ms, "ms", floors_ms.get(point, 0.0) / ms or None, f"{min(gaps):.2f} to {max(gaps):.2f}")
    if engine.name.endswith("again"):
        return
    for length in run.pick(_LENGTHS, (32,)):
        taken = [engine.batch([engine.draw(length)], 1) * 1e3 for _ in range(num_runs + 1)]
        yield Row(f"{engine.name} ttft {length}", statistics.median(taken[1:]), "ms")
    history, taken = engine.draw(run.pick(_LENGTHS[-1], 32)), []
    for _ in range(num_runs + 2):  # the first computes the history, the second captures what is new
        taken.append(engine.batch([history + engine.draw(_TURN)], 1) * 1e3)
    yield Row(f"{engine.name} ttft {_TURN} on a cached {_LENGTHS[-1]}", statistics.median(taken[2:]), "ms")


def _ratios(run: Run) -> Iterator[Row]:
    """What ours takes of theirs, with the mean of both turns where there were two."""
    found: dict[str, float] = {}
    for file in ("ours", "vllm", "ours-again"):
        if (path := run.folder / f"{file}.jsonl").exists():
            rows = [Row(*json.loads(line)) for line in path.read_text().splitlines()]
            found |= {row.name: row.value for row in rows if row.value is not None}
    for name in [name.removeprefix("vllm ") for name in found if name.startswith("vllm ")]:
        ours = [found[key] for key in (f"ours {name}", f"ours again {name}") if key in found]
        if ours:
            drift = f"again {ours[1] / ours[0]:.3f}" if len(ours) > 1 else ""
            yield Row(f"ours / vllm, {name}", statistics.mean(ours) / found[f"vllm {name}"], note=drift)


def _name(prompts: Prompts, size: int) -> str:
    return f"{prompts.name}{f' {prompts.shared}' if prompts.shared else ''} b{size}"


def _dry(run: Run, prompts: Prompts) -> Prompts:
    return prompts if not run.is_dry else Prompts(prompts.name, min(prompts.shared, 64), 32)
