"""`make gpu-check`: does it work here? Compile, compare with float64, run tests, measure ceilings, serve a little."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree

import torch
from attention.machine import measure_ceilings
from attention.scenes import layers_for
from attention.timing import Arm, interleaved
from cache_engines import (
    CachedModel,
    KeptStore,
    answers,
    cache_config,
    cached_model,
    make_engine,
    num_replays,
    wait_for_saves,
)
from gpu import precompile, smoke
from gpu.predictions import DATA_SHEETS
from gpu.steps import Row, Run, Step
from random_models import model_config
from workloads import WORKLOADS, make_prompts

from mneme.kernels.linear import PlainLinear
from mneme.replicas.engine.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
_ROWS = (1, 8, 32, 128, 256, 512, 2048)
_NUM_REQUESTS, _NUM_NEW = 16, 40


def steps(is_dry: bool) -> list[Step]:
    """In an order in which each makes the next worth its time."""
    return [
        Step("environment", 15, {"environment": _environment}),
        Step("precompile", 120, precompile.jobs(is_dry), precompile.NUM_JOBS if not is_dry else 2),
        Step("smoke", 60, smoke.jobs(), 12 if not is_dry else 2, must_pass=True),
        Step("tests", 170, {"tests": _tests}),
        Step("ceilings", 50, {"ceilings": _ceilings}),
        Step("engine", 80, {"engine": _engine, "engine, 8B": _large_engine}),
    ]


def _environment(run: Run) -> Iterator[Row]:
    commands = (["nvidia-smi"], [sys.executable, "-m", "pip", "list", "--format=freeze"], ["nvcc", "--version"])
    found = []
    for command in commands[run.pick(0, 2) :]:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            found.append(f"$ {command[0]}: {error}")
        else:
            found.append(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}")
    (run.folder / "environment.txt").write_text("\n".join(found))
    if not run.is_dry:
        memory = torch.cuda.get_device_properties(0).total_memory
        yield Row(
            "device memory", memory / 1e9, "GB", note=f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        )


def gpu_tests() -> list[str]:
    """The files that hold tests marked `gpu`, all others left aside: some import what is not on a GPU machine."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path) for path in found if re.search(r"mark\.gpu\b|\btriton_device\b", path.read_text())]


def _tests(run: Run) -> Iterator[Row]:
    """pytest in this process; natively with a worker per core, as each test compiles variants of its own."""
    import pytest

    report, started = run.folder / "tests.xml", time.monotonic()
    options = ["-m", "gpu", "-v", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    options += ["-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=default", f"--junitxml={report}"]
    if importlib.util.find_spec("pytest_timeout") is None:
        options += ["-o", "timeout=", "-W", "ignore::pytest.PytestConfigWarning"]
    else:
        options += ["--timeout=150"]
    if run.is_dry:
        options += ["--collect-only"]
    elif importlib.util.find_spec("xdist"):
        options += ["-n", "12", "--dist", "worksteal"]
    code = pytest.main([*options, *gpu_tests()])
    took_s = time.monotonic() - started
    if run.is_dry:
        yield Row("tests", took_s, "s")
        if code != 0:
            raise SystemExit(f"pytest ended with {int(code)}: tests could not be collected")
        return
    note, reason = verdict_of(report, int(code))
    yield Row("tests", took_s, "s", note=note)
    if reason is not None:
        raise SystemExit(reason)


def verdict_of(report: Path, code: int) -> tuple[str, str | None]:
    """What a run of pytest says by its JUnit report and exit code: in short, and why it failed, if it did."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase")) if report.exists() else []
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    num_skipped = sum(case.find("skipped") is not None for case in cases)
    num_passed = len(cases) - len(bad) - num_skipped
    note = f"{num_passed} passed, {len(bad)} failed, {num_skipped} skipped"
    if code != 0 or bad:
        return (
            note,
            f"pytest ended with {code}; {len(bad)} tests failed: {', '.join(str(c.get('name')) for c in bad[:4])}",
        )
    return note, None if num_passed else f"no test ran: {note}"


def of_data_sheet(name: str, value: float, unit: str) -> Row:
    """A ceiling and its share of what the card's data sheet says, where that is known."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    sheet = next((sheet for card, sheet in DATA_SHEETS.items() if card in device), None)
    return Row(name, value, unit, None if sheet is None else value / sheet[name])


def _ceilings(run: Run) -> Iterator[Row]:
    """The roofs that everything else is held against: memory, and the products of Llama-3-8B at several rows."""
    dtype, device = run.pick(torch.bfloat16, torch.float32), run.device
    roofs = measure_ceilings(device, [dtype], num_runs=run.pick(5, 1))
    yield of_data_sheet("copy", roofs.copy_bytes_per_s / 1e12, "TB/s")
    read = torch.ones(run.pick(1 << 30, 1 << 12), dtype=torch.float32, device=device)
    ms = interleaved([Arm("sum", lambda _: read.sum())], device, budget_s=0.2).ms("sum")
    read_bytes = read.numel() * 4
    yield Row("read-only sum", read_bytes / ms / 1e9, "TB/s", read_bytes / ms * 1e3 / roofs.copy_bytes_per_s)
    yield of_data_sheet("product of 8192", roofs.flops_per_s[dtype] / 1e12, "TFLOP/s")
    config = model_config(run.pick("llama-3-8b", "llama-5m"))
    shapes = {
        "qkv": (config.q_size + 2 * config.kv_size, config.hidden_size),
        "o": (config.hidden_size, config.q_size),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
        "head": (config.vocab_size, config.hidden_size),
    }
    per_call: dict[tuple[str, int], float] = {}
    for name, (outputs, inputs) in shapes.items():
        num_bytes = outputs * inputs * dtype.itemsize
        weights = [
            torch.empty(outputs, inputs, dtype=dtype, device=device).normal_(std=0.02)
            for _ in range(layers_for(num_bytes, run.pick(roofs.cache_bytes, 0)))
        ]
        linears, out_dtype = [PlainLinear(weight) for weight in weights], torch.float32 if name == "head" else None
        inputs_by_rows = {rows: torch.randn(rows, inputs, device=device).to(dtype) for rows in run.pick(_ROWS, (1, 8))}
        arms = [
            Arm(str(rows), lambda i, x=x, ls=linears, t=out_dtype: ls[i](x, t), len(linears))  # type: ignore[misc]
            for rows, x in inputs_by_rows.items()
        ]
        times = interleaved(arms, device, budget_s=run.pick(2.0, 0.0))
        for rows in inputs_by_rows:
            per_call[name, rows] = ms = times.ms(str(rows))
            best_ms = max(num_bytes / roofs.copy_bytes_per_s, 2.0 * rows * outputs * inputs / roofs.flops_per_s[dtype])
            yield Row(
                f"linear {name} M {rows}", ms, "ms", best_ms * 1e3 / ms, times.launched[str(rows)], is_detail=True
            )
        del weights, linears, arms
    layer_weights = sum(a * b for name, (a, b) in shapes.items() if name != "head")
    num_weights = config.num_layers * layer_weights + shapes["head"][0] * shapes["head"][1]
    for rows in sorted({rows for _, rows in per_call}):
        ms = sum(per_call[n, rows] * (1 if n == "head" else config.num_layers) for n in shapes)
        best_s = max(
            num_weights * dtype.itemsize / roofs.copy_bytes_per_s, 2.0 * rows * num_weights / roofs.flops_per_s[dtype]
        )
        yield Row(f"linears of a step, M {rows}", ms, "ms", best_s * 1e3 / ms)


def _engine(run: Run) -> Iterator[Row]:
    """Graphs and the cache tier together, in float32: the tokens of an engine that has neither."""
    model = cached_model(run.pick("llama-31m", "llama-5m"), 1024, run.device, torch.float32)
    yield from _served(run, model, "engine", is_exact=True)


def _large_engine(run: Run) -> Iterator[Row]:
    """The same in bfloat16, where tokens may differ by rounding: that it runs, replays, saves and loads."""
    model = cached_model(run.pick("llama-3-8b", "llama-5m"), 1024, run.device)
    yield from _served(run, model, "engine, 8B", is_exact=False)


def _served(run: Run, model: CachedModel, name: str, *, is_exact: bool) -> Iterator[Row]:
    prompts = make_prompts(WORKLOADS["W"]._replace(num_requests=run.pick(_NUM_REQUESTS, 2), num_private=290))
    num_pages, num_new = len(prompts) * 40 + 64, run.pick(_NUM_NEW, 4)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        cache = cache_config(Path(folder), 8 << 30)
        store = KeptStore(cache)
        with closing(make_engine(model, store, cache, num_pages)) as engine:
            first = _answers(engine, prompts, num_new)
            wait_for_saves(engine)
            replays, graphs = num_replays(engine), engine.runner.graphs
        with closing(make_engine(model, store, cache, num_pages)) as engine:
            again = _answers(engine, prompts, num_new)
        counts = store.stats()
        store.end()
    num_failed = 0 if graphs is None else graphs.num_failed
    note = f"{replays} replays, {num_failed} captures failed, {counts.get('located')} chunks from the tier"
    yield Row(f"{name}, {len(prompts)} requests twice", time.monotonic() - started, "s", note=note)
    if not run.is_dry and (num_failed or not replays):
        raise SystemExit(f"{name}: {replays} steps were replayed, {num_failed} captures failed; see the log")
    if not counts.get("located"):
        raise SystemExit(f"{name}: nothing came back from the cache tier: {counts}")
    if is_exact:
        plain = make_engine(model, None, cache, num_pages)
        plain.runner.graphs = None  # every step is launched
        expected = _answers(plain, prompts, num_new)
        for what, tokens in (("with graphs and saves", first), ("from the tier", again)):
            wrong = [index for index, (got, want) in enumerate(zip(tokens, expected, strict=True)) if got != want]
            if wrong:
                raise SystemExit(f"{name}: tokens {what} are not those of an eager engine, requests {wrong}")


def _answers(engine: Engine, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    return [answer.token_ids for answer in answers(engine, prompts, num_new)]
