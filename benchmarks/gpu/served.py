"""`make gpu-served`: `mneme serve` on a GPU under load, as its clients see it, and through the loss of a replica.

A model of Llama-3-8B's shape with random weights and a tokenizer of whole words, so that a word of the load tool
(`mneme bench serve`'s own, in processes beside the server) is a token and no token is withheld. `over step` is what
HTTP, its processes and the interpreter lock add to a token: the median gap between a stream's tokens less the mean of
the engine's own decode steps in the same seconds (`/metrics`). In mode `local` the server has no Ray, and one process.
Bound: a step reads the weights and the KV once, which is what `of limit` holds the gaps against.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import torch
from gpu.predictions import DATA_SHEETS, SERVED_AHEAD
from gpu.steps import Row, Run, Step
from harness import NOT_RUN
from random_models import SHAPES, head_weights, kv_bytes_per_token, layer_weights, model_config
from workloads import write_random_llama

from mneme.lab.bench.client import ChatClient, connect
from mneme.lab.bench.measure import Answer, summarize
from mneme.lab.bench.traffic import SessionPlayer
from mneme.lab.bench.workloads import _WORDS, Session, Shape, arrive, make_sessions

ROOT = Path(__file__).resolve().parents[2]
MARKER = "MNEME_SERVED_RUN"
_STREAMS_PER_CLIENT = 32
_NUM_CLIENTS = 4
_LOOK_S = 0.2
_NOT_OF_SERVERS = ("TRITON_INTERPRET", "OMP_NUM_THREADS", "OUT")  # of the environment: a server has its own
_STOP_S = 12.0
_KILLED_MODEL = "mneme-tiny"  # in float32: its tokens are the same whatever is computed beside them


class Traffic(NamedTuple):
    """One load; lengths in words, which are tokens."""

    shape: Shape
    num_requests: int
    num_users: int | None  # each with one request at a time; None: they arrive by themselves
    think_s: float = 0.0
    options: Mapping[str, Any] = MappingProxyType({})


_LONG, _BEHIND_SHARED = Shape(words=512, max_tokens=128), Shape(words=64, prefix_words=2048, max_tokens=128)
TRAFFIC = {
    "32 in flight": Traffic(_LONG, 8 * 32, 32),
    "128 in flight": Traffic(_LONG, 4 * 128, 128),
    "128 over 2048 shared": Traffic(_BEHIND_SHARED, 5 * 128, 128),
    "1 in flight": Traffic(_LONG, 8, 1),
    "Poisson": Traffic(_LONG, 320, None),  # at 0.7 of what 128 in flight came to
    "64 x 4 turns": Traffic(Shape(turns=4, words=512, max_tokens=128), 64 * 4, None, think_s=2.0),
    "top-p 0.95 at 32": Traffic(_LONG, 4 * 32, 32, options={"temperature": 1.0, "top_p": 0.95, "seed": 0}),
}
_SECONDS = {"128 in flight": 35, "Poisson": 30, "64 x 4 turns": 35}


def steps(_is_dry: bool, mode: str) -> list[Step]:
    """What matters most first: what does not fit is not run."""
    return [
        Step("model", 60, {"model": _write_model}, must_pass=True),
        Step("serve", 200, {"serve": partial(_serve, mode=mode)}, must_pass=True),
        *(
            Step(f"load {name}", _SECONDS.get(name, 25), {name: partial(_load, name=name, number=number)})
            for number, name in enumerate(TRAFFIC)
        ),
        Step("stop", 15, {"stop": _stop}),
        Step("kill", 90, {"kill": partial(_kill, mode=mode)}),
        Step("restart", 70, {"restart": partial(_restart, mode=mode)}),
    ]


def clean_up(folder: Path) -> None:
    """End what servers of this run are left, whatever happened before, and remove the model."""
    for pid in _processes(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if (kept := folder / "model.txt").exists():
        shutil.rmtree(kept.read_text(), ignore_errors=True)


# The model


def _write_model(run: Run) -> Iterator[Row]:
    """A checkpoint in memory, made on the device, as `mneme serve DIR` reads it."""
    name, dtype = run.pick(("llama-3-8b", torch.bfloat16), ("llama-5m", torch.float32))
    began_s, config = time.monotonic(), model_config(name)
    num_bytes = dtype.itemsize * (layer_weights(config) + 2 * head_weights(config))
    place = next((p for p in ("/dev/shm",) if os.path.isdir(p) and shutil.disk_usage(p).free > 1.2 * num_bytes), None)
    folder = Path(tempfile.mkdtemp(prefix="mneme-served-", dir=place)) / name
    (run.folder / "model.txt").write_text(str(folder.parent))
    torch.set_default_dtype(dtype)
    with run.device:
        write_random_llama(folder, **SHAPES[name], bos_token_id=0, eos_token_id=1)
    _write_tokenizer(folder, config.vocab_size)
    yield Row("model written", time.monotonic() - began_s, "s", note=f"{num_bytes / 1e9:.1f} GB to {folder.parent}")


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """The load tool's words first, then made ones: what the model draws is a word, too."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = list(dict.fromkeys(["<s>", "</s>", "<unk>", *_WORDS]))
    words += [f"w{i}" for i in range(len(words), vocab_size)]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    made.save_pretrained(folder)


# Servers


def _serve(run: Run, mode: str) -> Iterator[Row]:
    """One replica; its KV takes less than 64 sessions of 4 turns do, so that they need the host tier."""
    yield from _start(run, "served ready", mode, *_model_options(run))


def _model_options(run: Run) -> list[str]:
    model = next(Path((run.folder / "model.txt").read_text()).iterdir())
    pool = run.pick(["kv_cache_bytes=17179869184", "host_cache_bytes=34359738368"], ["num_pages=512"])
    return [str(model), *(f"engine.{each}" for each in ("max_running=256", "blend.mode=off", *pool)), "replicas=1"]


def _start(run: Run, name: str, mode: str, model: str, *settings: str) -> Iterator[Row]:
    """Yield the seconds from the command to `ready:`, and those of each stage that the server tells."""
    log = run.folder / f"{name.replace(' ', '-')}.log"
    command = [sys.executable, "-m", "mneme.cluster.cli.main", "serve", model, "--port", str(_free_port())]
    command += ["--local"] * (mode == "local")
    command += [part for setting in settings for part in ("--set", setting)]
    environment = {key: value for key, value in os.environ.items() if key not in _NOT_OF_SERVERS}
    paths = [str(ROOT / "src"), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {MARKER: str(run.folder.resolve()), "PYTHONPATH": os.pathsep.join(paths), "RAY_AUTH_MODE": "token"}
    environment["XDG_STATE_HOME"] = os.devnull  # no KV of another server's
    began_s = time.monotonic()
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=sink, env=environment, cwd=ROOT, start_new_session=True,
            preexec_fn=partial(_run_on, _cores()[0]),
        )  # fmt: skip
    (run.folder / "server.txt").write_text(str(process.pid))
    stages, line, shown = list[tuple[str, float]](), "", 0
    while not line.startswith("ready:"):
        if process.poll() is not None:
            raise SystemExit(f"the server ended: {' '.join(log.read_text().split())[-200:]}")
        if run.is_late:
            raise SystemExit(f"not ready in time, at {stages[-1][0] if stages else 'the start'}")
        time.sleep(0.05)
        for line in (lines := log.read_text().splitlines())[shown:]:
            if line.startswith("ready:"):
                break
            if line.startswith("mneme serve: "):
                stages.append((line.removeprefix("mneme serve: "), time.monotonic() - began_s))
        shown = len(lines)
    ready_s = time.monotonic() - began_s
    (run.folder / "server.txt").write_text(f"{process.pid} {line.split()[1]}")
    ends = [*(at_s for _, at_s in stages[1:]), ready_s]
    took = [(stage, end_s - at_s) for (stage, at_s), end_s in zip(stages, ends, strict=True)]
    longest = sorted(took, key=lambda each: -each[1])[:3]
    yield Row(name, ready_s, "s", note=", ".join(f"{stage} {seconds:.0f}" for stage, seconds in longest))
    for stage, seconds in took:
        yield Row(f"{name}: {stage}", seconds, "s", is_detail=True)


def _stop(run: Run) -> Iterator[Row]:
    pid = int((run.folder / "server.txt").read_text().split()[0])
    began_s = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGINT)
    while _processes(run.folder) and time.monotonic() < began_s + _STOP_S:
        time.sleep(0.1)
    left = _processes(run.folder)
    for each in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    yield Row("served stop", time.monotonic() - began_s, "s", note=f"{len(left)} killed", is_detail=True)


def _url(run: Run) -> str:
    return (run.folder / "server.txt").read_text().split()[1]


def _processes(folder: Path) -> dict[int, str]:
    """Command lines by pid of all that inherited the marker of this run's servers."""
    found = {}
    mark = f"{MARKER}={folder.resolve()}".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return found


def _cores() -> tuple[list[int], list[int]]:
    """Of the server, and of its clients: apart where there are eight or more."""
    cores = sorted(os.sched_getaffinity(0))
    return (cores[:-_NUM_CLIENTS], cores[-_NUM_CLIENTS:]) if len(cores) >= 2 * _NUM_CLIENTS else (cores, cores)


def _run_on(cores: list[int]) -> None:
    os.sched_setaffinity(0, cores)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Loads


def _load(run: Run, name: str, number: int) -> Iterator[Row]:
    traffic = TRAFFIC[name]
    if run.is_dry:
        small = {"words": 16, "max_tokens": 8, "prefix_words": 64 if traffic.shape.prefix_words else 0}
        few = {"num_requests": 8, "num_users": traffic.num_users and min(traffic.num_users, 4)}
        traffic = traffic._replace(shape=traffic.shape._replace(**small), **few, think_s=0.0)
    url, workload = _url(run), "shared-prefix" if traffic.shape.prefix_words else "sessions"
    sessions = make_sessions(workload, traffic.shape, traffic.num_requests, number)
    if name == "Poisson":
        sessions = arrive(sessions, _measured_rate(run, "128 in flight") * 0.7, 0.0, number)
    elif traffic.num_users is None:  # all begin within the time of a thought
        per_s = len(sessions) * traffic.shape.turns / max(traffic.think_s, 0.1)
        sessions = arrive(sessions, per_s, traffic.think_s, number)
    watch = Watch(run, url)
    answers, busiest = play(url, sessions, traffic.num_users, dict(traffic.options), run.left_s, watch.look)
    seen = watch.end()
    figures = summarize(answers, {})
    (run.folder / f"load-{number}.json").write_text(json.dumps({"load": name, **figures}) + "\n")
    if not figures["num_ok"]:
        raise SystemExit(f"nothing was answered: {figures['first_error']}")
    yield from _rows(run, f"served {name}", traffic, figures, seen, busiest)


def _rows(
    run: Run, name: str, traffic: Traffic, figures: dict[str, Any], seen: dict[str, float], busiest: float
) -> Iterator[Row]:
    itl, ttft, failed = figures["itl_ms"], figures["ttft_ms"], figures["num_failed"]
    cut = traffic.num_requests - figures["num_requests"]
    notes = [f"{failed} failed: {figures['first_error']}"] * bool(failed) + [f"cut short by {cut}"] * (cut > 0)
    if run.is_dry and notes:
        raise SystemExit(", ".join(notes))
    notes += [f"{figures['cached_share'] or 0:.0%} cached"]
    notes += [f"{seen[what]:.0f} {what}" for what in ("shared segments", "host tokens") if seen[what]]
    yield Row(f"{name}, tokens/s", figures["output_tokens_per_s"], note=", ".join(notes))
    yield Row(f"{name}, TTFT", ttft["p50"], "ms", note=f"p99 {ttft['p99']:.0f}")
    floor_ms, ahead = _floor_ms(run, traffic, seen), SERVED_AHEAD.get(f"{name}, ITL")
    later = "" if ahead is None else f"; one step ahead: {ahead:g}"
    yield Row(f"{name}, ITL", itl["p50"], "ms", floor_ms and floor_ms / itl["p50"], f"p99 {itl['p99']:.1f}{later}")
    step_ms, busy = seen.get("step_ms"), f"GPU {seen['gpu']:.0%}, client {busiest:.0%} of a core"
    note = f"step {step_ms:.2f}, replayed {seen['replayed']:.0%}, {busy}" if step_ms else f"no step seen, {busy}"
    yield Row(f"{name}, over step", step_ms and itl["p50"] - step_ms, "ms", note=note)
    yield Row(f"{name}, TTFT p99", ttft["p99"], "ms", is_detail=True)
    yield Row(f"{name}, ITL p99", itl["p99"], "ms", is_detail=True)
    yield Row(f"{name}, per token", figures["tpot_ms"] and figures["tpot_ms"]["p50"], "ms", is_detail=True)
    for key, value in seen.items():
        yield Row(f"{name}, {key}", value, is_detail=True)


def _floor_ms(run: Run, traffic: Traffic, seen: dict[str, float]) -> float | None:
    """A decode step that only reads, at the data sheet's bandwidth: weights, and each distinct token's KV."""
    copy_tb_s = next((of["copy"] for name, of in DATA_SHEETS.items() if name in _device_name(run)), None)
    if copy_tb_s is None:
        return None
    config, dtype = model_config("llama-3-8b"), torch.bfloat16
    num_users = traffic.num_users or seen["running"]
    tokens = traffic.shape.prefix_words + num_users * (traffic.shape.words + traffic.shape.max_tokens / 2)
    num_bytes = dtype.itemsize * (layer_weights(config) + head_weights(config))
    return float((num_bytes + tokens * kv_bytes_per_token(config, dtype)) / copy_tb_s / 1e9)


def _device_name(run: Run) -> str:
    if run.is_dry:
        return ""
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))


def _measured_rate(run: Run, name: str) -> float:
    """Requests per second of a load before; what was predicted where that did not run."""
    for file in run.folder.glob("load-*.json"):
        if (found := json.loads(file.read_text()))["load"] == name and found["requests_per_s"]:
            return float(found["requests_per_s"])
    return 30.0


def play(
    url: str, sessions: Sequence[Session], num_users: int | None, options: Mapping[str, Any], limit_s: float,
    look: Callable[[], object] = lambda: None,
) -> tuple[list[Answer], float]:  # fmt: skip
    """Ask by several processes; returns what had ended within the time, and the share of a core that the busiest took.

    look  called several times a second meanwhile
    """
    num = 1 if num_users is not None and num_users < _STREAMS_PER_CLIENT else _NUM_CLIENTS
    share = None if num_users is None else -(-num_users // num)
    context, pipes = multiprocessing.get_context("fork"), []
    for index in range(num):
        ours, theirs = context.Pipe(duplex=False)
        part = (url, sessions[index::num], share, options, limit_s, _cores()[1])
        context.Process(target=_client, args=(theirs, *part), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    waiting, parts = list(pipes), list[tuple[list[Answer], float]]()
    while waiting:
        for pipe in connection.wait(waiting, timeout=_LOOK_S):
            parts.append(pickle.loads(pipe.recv_bytes()))  # type: ignore[union-attr]
            waiting.remove(pipe)  # type: ignore[arg-type]
        look()
    return [answer for answers, _ in parts for answer in answers], max(busy for _, busy in parts)


def _client(pipe: Any, url: str, sessions: Any, num_users: Any, options: Any, limit_s: float, cores: Any) -> None:
    _run_on(cores)
    cpu_s, began_s = time.process_time(), time.monotonic()
    answers = asyncio.run(_ask(url, sessions, num_users, options, limit_s))
    busy = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
    pipe.send_bytes(pickle.dumps((answers, busy)))


async def _ask(url: str, sessions: Any, num_users: Any, options: Any, limit_s: float) -> list[Answer]:
    async with connect(url) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        body = {"model": model, "temperature": 0, "ignore_eos": True, **options}
        load = SessionPlayer(ChatClient(http, body, session_header=True, timeout_s=600.0).ask)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await load.play(sessions, num_users)
        return load.answers


class Watch:
    """What the server's metrics and the driver say while a load runs."""

    def __init__(self, run: Run, url: str) -> None:
        self._run, self._url = run, url
        self._samples: list[tuple[float, float, float]] = []  # running, shared segments, GPU busy
        self._before = _metrics(url)
        self._busy: Callable[[], float] | None = None

    def look(self) -> None:
        """Take a sample. The driver is asked for the first time behind the forks."""
        self._busy = self._busy or _gpu_busy(self._run)
        now = _metrics(self._url)
        running = now.get('mneme_requests{state="running"}', 0.0)
        self._samples.append((running, now.get("mneme_shared_segments", 0.0), self._busy()))

    def end(self) -> dict[str, float]:
        now = _metrics(self._url)
        more = {key: value - self._before.get(key, 0.0) for key, value in now.items()}
        kinds = '{kind="decode"}'
        count, took_s = (more.get(f"mneme_cost_{what}_total{kinds}", 0.0) for what in ("predictions", "actual_seconds"))
        replays, num_steps = more.get("mneme_cuda_graph_replays_total", 0.0), more.get("mneme_engine_steps_total", 0.0)
        running, shared, gpu = (max(of, default=0.0) for of in zip(*self._samples, strict=True))
        busy = [each[2] for each in self._samples if each[0]]
        return {
            **({"step_ms": 1e3 * took_s / count} if count else {}),
            "steps": num_steps, "replayed": replays / num_steps if num_steps else 0.0,
            "graph failures": now.get("mneme_cuda_graph_failures_total", 0.0),
            "host tokens": more.get("mneme_host_tokens_total", 0.0),
            "running": running, "shared segments": shared, "gpu": sum(busy) / len(busy) if busy else gpu,
        }  # fmt: skip


def _metrics(url: str) -> dict[str, float]:
    """By sample, summed over replicas and models."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=30.0).text.splitlines():
        if match := re.fullmatch(r"(mneme_\w+)(\{.*\})? (\S+)", line):
            key = match[1] + "".join(f"{{{each}}}" for each in re.findall(r'(?:kind|state)="\w+"', match[2] or ""))
            found[key] = found.get(key, 0.0) + float(match[3])
    return found


def _gpu_busy(run: Run) -> Callable[[], float]:
    if run.is_dry:
        return lambda: 0.0
    import pynvml

    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    return lambda: pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100


# Losses


def _kill(run: Run, mode: str) -> Iterator[Row]:
    """Two replicas of the embedded model in float32, on halves of the GPU; one is killed under 16 streams."""
    if mode == "local":
        yield Row("kill -9 under 16 streams, failed", None, note=f"{NOT_RUN}: one process has no other replica")
        return
    on_gpu = run.pick(["gpus_per_replica=0.45", "engine.host_cache_bytes=0", "engine.kv_cache_bytes=4294967296"], [])
    yield from _start(run, "two replicas ready", mode, _KILLED_MODEL, "replicas=2", "engine.dtype=float32", *on_gpu)
    url, limit_s = _url(run), run.left_s
    shape = Shape(words=100, max_tokens=run.pick(1024, 256))
    sessions = make_sessions("sessions", shape, 16, 99)
    began_s = time.monotonic()
    undisturbed, _ = play(url, sessions, 16, {}, limit_s)
    took_s = time.monotonic() - began_s
    engines = [pid for pid, command in _processes(run.folder).items() if command.endswith(":engine")]
    victims = engines[:1]
    due_s = time.monotonic() + took_s * 0.3

    def kill() -> None:
        if victims and time.monotonic() > due_s:
            os.kill(victims.pop(), signal.SIGKILL)

    disturbed, _ = play(url, sessions, 16, {}, run.left_s, kill)
    figures = summarize(disturbed, {})
    failed = figures["num_failed"] + 16 - figures["num_requests"]
    yield Row("kill -9 under 16 streams, failed", failed, note=figures["first_error"] or "")
    texts = {answer.session: answer.text for answer in undisturbed}
    same = sum(texts.get(answer.session) == answer.text for answer in disturbed)
    if run.is_dry and (failed or same < 16 or victims):
        raise SystemExit(f"{failed} failed: {figures['first_error']}; {same} identical; {len(victims)} not killed")
    moved = f"one of {len(engines)} engines, {max(len(text) for text in texts.values())} characters"
    yield Row("kill -9 under 16 streams, identical", same, note=f"{moved}; float32")
    pause_s = max((gap for answer in disturbed for gap in answer.itl_s), default=0.0)
    yield Row("kill -9 under 16 streams, pause", pause_s * 1e3, "ms")
    yield from _stop(run)


def _restart(run: Run, mode: str) -> Iterator[Row]:
    """The first server once more: compiled kernels and costs are remembered."""
    yield from _start(run, "served ready again", mode, *_model_options(run))
    yield from _stop(run)
