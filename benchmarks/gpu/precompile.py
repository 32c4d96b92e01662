"""Compiles the kernels that benchmarks and engines launch, many at a time, before anything is timed.

A variant of the attention kernel takes a compiler 6 to 8 s, and a process compiles one after the other. Each job here
makes the real call on a small scene, so it compiles what the real caller compiles, under the same key of Triton's disk
cache, whatever that key is made of; the target's later processes find it there. What an engine needs is compiled as
engines do before they are ready, by processes of the job's own. A job that fails names its variant: nothing timed
later would have said so.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from functools import partial
from typing import get_args

import torch
from attention.scenes import Heads, int8_scene, prefix_scene
from gpu.model import Model, Prompts
from gpu.smoke import backend_of
from gpu.steps import Job, Row, Run
from gpu.tune import config_arms, timed, wide_arms

from mneme.kernels.triton.configs import WIDE_CANDIDATES, Config, Kind, candidates
from mneme.kernels.triton.modules import triton_trouble
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.warm_up import variants_of

NUM_JOBS = 12
_NUM_PROCESSES = 4  # of each engine's job
_HEADS = (Heads(32, 8, 128), Heads(32, 32, 128), Heads(8, 4, 64), Heads(8, 8, 64), Heads(40, 40, 128))
_GQA = _HEADS[0]
_MODELS = ("llama-3-8b", "llama-2-7b", "llama-31m")


def _attention(run: Run, heads: Heads, dtype: torch.dtype, rows: int, is_int8: bool = False) -> Iterator[Row]:
    """A decode, or with several rows a prefill, over a shared prefix: with it the merge and the key positions.

    is_int8  KV is
    """
    if run.is_dry:
        heads, dtype = Heads(heads.group, 1, 16), torch.float32
    batch, shared = (4, 512) if rows == 1 else (1, 512)
    if run.is_dry:
        batch, shared, rows = min(batch, 2), 32, min(rows, 4)
    scene = prefix_scene(
        batch, shared, 64 if not run.is_dry else 32, rows_per_sequence=rows, heads=heads, dtype=dtype,
        device=run.device, page_size=32,
    )  # fmt: skip
    scene = int8_scene(scene) if is_int8 else scene
    for share in ("always", "never"):
        out = scene.attend(0, scene.plan(share), backend=backend_of(run))
    if not torch.isfinite(out).all():
        raise SystemExit("what it computes is not finite")
    yield from ()


def _candidate(run: Run, kind: Kind, config: Config, rows: int) -> Iterator[Row]:
    """One configuration that tuning will try: of a private decode, of one over a shared prefix, or of a prefill."""
    shared, options = 512 if kind == "mixed" and rows == 1 else 0, {"heads": _GQA, "dtype": torch.bfloat16}
    scene = prefix_scene(1 if rows > 1 else 8, shared, 512, rows_per_sequence=rows, device=run.device, **options)
    timed(config_arms(scene, [config]), scene, 0.0)
    yield from ()


def _wide(run: Run, number: int) -> Iterator[Row]:
    """One way of launching wide tiles, and what runs beside them."""
    scene = prefix_scene(
        8, 512, 512, rows_per_sequence=8, heads=_GQA, dtype=torch.bfloat16, device=run.device, page_size=64
    )
    wide_arms(scene)[1 + number].output()
    yield from ()


def _engine(run: Run, name: str) -> Iterator[Row]:
    """All that a step launches: greedy and drawn tokens, 1, 2 and 16 rows, a prefill; eager, captured, replayed."""
    batches, num_steps = run.pick(((1, 2, 16), 4), ((1, 2), 1))
    prompts = Prompts("private", 0, run.pick(64, 32))
    # The small one is what `check` serves in float32.
    dtype = torch.float32 if run.is_dry or name == "llama-31m" else torch.bfloat16
    model = Model(
        run.pick(name, "llama-5m"), run.device, dtype, max_batch=max(batches), prompts=(prompts,), num_steps=num_steps
    )
    if not run.is_dry:
        from mneme.kernels.triton.precompile import compile_all

        variants = variants_of(model.runner, None, EngineConfig(page_size=model.runner.page_size))
        compile_all(variants, lambda _share: None, _NUM_PROCESSES)
    for batch in batches:
        engine = model.decoding(batch, prompts)
        for _ in range(num_steps):
            engine.step()
    model.decoding(2, prompts, temperature=0.8, top_p=0.95)
    model.decoding(2, prompts, temperature=0.8)
    yield from ()


def _named(job: Job, run: Run) -> Iterator[Row]:
    """A compiler's errors go over many lines: the one that is shown says what to do."""
    try:
        yield from job(run)
    except Exception as error:
        if (trouble := triton_trouble(error)) is None:
            raise
        traceback.print_exc()
        raise SystemExit(f"{trouble}; what needs this will fail, figures of other kernels stand") from None


def jobs(is_dry: bool) -> dict[str, Job]:
    """By variant. Engines first: they take longest."""
    return {name: partial(_named, job) for name, job in _variants(is_dry).items()}


def _variants(is_dry: bool) -> dict[str, Job]:
    found: dict[str, Job] = {f"compile {name}": partial(_engine, name=name) for name in _MODELS}
    for heads in _HEADS:
        dtypes = (torch.bfloat16, torch.float16) if heads == _HEADS[-1] else (torch.bfloat16,)
        for dtype in dtypes:
            for rows in (1, 256):
                kind = f"{'decode' if rows == 1 else 'prefill'} {heads} {str(dtype).removeprefix('torch.')}"
                found[f"compile {kind}"] = partial(_attention, heads=heads, dtype=dtype, rows=rows)
    for rows in (1, 256):
        name = f"compile {'decode' if rows == 1 else 'prefill'} {_GQA} int8"
        found[name] = partial(_attention, heads=_GQA, dtype=torch.bfloat16, rows=rows, is_int8=True)
    if is_dry:
        return dict(list(found.items())[2:5])
    for number in range(1 + len(WIDE_CANDIDATES)):
        found[f"compile wide {number}"] = partial(_wide, number=number)
    for kind in get_args(Kind):
        _, *others = candidates(head_dim=_GQA.dim, element_bytes=2, num_groups=_GQA.group, kind=kind)
        for config in others:
            for rows in (1, 256) if kind == "mixed" else (1,):
                name = f"compile candidate {kind} {'x'.join(map(str, config))} rows {rows}"
                found[name] = partial(_candidate, kind=kind, config=config, rows=rows)
    return found
