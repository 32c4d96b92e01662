"""Servers that are arms of a benchmark: `mneme serve` with settings of its own, and peers', under the lab's load.

Each has one engine thread; all run while a benchmark does, and only the one whose turn it is has work. What a server
found in its caches, and how long its steps took, its own /metrics say.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from bench_real_model import reference
from harness import rounded
from peers.beside import PeerServer, vllm_server

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from mneme.lab.bench.client import ChatClient, connect  # noqa: E402
from mneme.lab.bench.measure import Answer, summarize  # noqa: E402
from mneme.lab.bench.traffic import SessionPlayer  # noqa: E402
from mneme.lab.bench.workloads import Piece, Session, Turn  # noqa: E402
from mneme.lab.chat import first_model  # noqa: E402
from mneme.replicas.model.directory import model_directory  # noqa: E402
from tests.e2e.server_process import SERVE, ServerProcess, free_port  # noqa: E402

# `share` is no option of a server: attention that reads shared pages once for each sequence is the papers' baseline.
NEVER_SHARED = """
import sys
from mneme.cluster.cli.main import main
from mneme.replicas.model.decoder import Decoder
Decoder.__init__.__kwdefaults__["share"] = "never"
sys.exit(main())
"""
_STEPS = re.compile(r'^mneme_cost_actual_seconds_total\{.*kind="(prefill|mixed|decode)".*\} (\S+)', re.MULTILINE)
_SOURCES = re.compile(r'^mneme_tenant_prompt_tokens_total\{.*source="(\w+)".*\} (\S+)', re.MULTILINE)


class Server(NamedTuple):
    url: str
    model: str
    processes: Callable[[], dict[int, str]]  # names by pid

    def counts(self) -> dict[str, float]:
        """Seconds in steps by kind, and prompt tokens by where their KV came from, since the start."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        found: dict[str, float] = {}
        for name, value in (*_STEPS.findall(text), *_SOURCES.findall(text)):
            found[name] = found.get(name, 0.0) + float(value)
        return found


def start(
    stack: ExitStack, model: str | Path, settings_by_arm: Mapping[str, Mapping[str, Any]], *, dtype: str = "bfloat16"
) -> dict[str, Server]:
    """Start a server for each arm, then wait for all.

    Two settings are not the server's: `share: never`, and `local: False`, a server on Ray.
    """
    processes = {}
    for arm, given in settings_by_arm.items():
        # Requests say how their documents are reused; no server is to measure answers while others have their turns.
        settings = {"engine.num_threads": 1, "engine.dtype": dtype, "engine.blend.mode": "off", **given}
        command = list(SERVE)
        if settings.pop("share", None) == "never":
            command = [sys.executable, "-c", NEVER_SHARED, "serve"]
        command += [str(model), "--port", str(free_port()), *(["--local"] if settings.pop("local", True) else [])]
        for key, value in settings.items():
            command += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
        processes[arm] = ServerProcess(command, OMP_NUM_THREADS="1")
        stack.callback(processes[arm].discard)
    return {arm: ready(process) for arm, process in processes.items()}


def ready(process: ServerProcess | PeerServer) -> Server:
    """Wait for a server that has been started."""
    url = process.await_ready()
    with httpx.Client(base_url=url, timeout=60) as http:
        return Server(url, first_model(http), process.processes)


def start_vllm(
    stack: ExitStack, python: str, model: str, options_by_arm: Mapping[str, Sequence[str]]
) -> dict[str, Server]:
    """Start vLLM's CPU build with a model's tensors in bfloat16 for each arm, prefix caching as it comes."""
    folder, directory = Path(stack.enter_context(tempfile.TemporaryDirectory())), model_directory(model)
    tensors, peers = write_bfloat16(reference(directory), directory, folder / model), {}
    for arm, options in options_by_arm.items():
        peers[arm] = vllm_server(python, tensors, model, free_port(), folder / f"{arm}.log", *options)
        stack.callback(peers[arm].stop)
    return {arm: ready(peer) for arm, peer in peers.items()}


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


class Played(NamedTuple):
    answers: list[Answer]
    figures: dict[str, Any]  # as `mneme bench serve` has them
    counts: dict[str, float]  # what the server's own grew by

    def normalized_s(self) -> list[float]:
        """Of each answer, from when it was due to its last token, for each of its tokens: the papers' latency."""
        ended = [each for each in self.answers if each.last_s is not None]
        return sorted((each.last_s - each.due_s) / (each.output_tokens or 1) for each in ended)


def play(
    server: Server, sessions: Sequence[Session], num_users: int | None = None, *, is_alone: bool = False,
    may_fail: bool = False, names_sessions: bool = True, **options: Any
) -> Played:  # fmt: skip
    """Ask a server all of it; raises RuntimeError if anything fails, unless it may.

    is_alone        each session has a cache of its own: nothing of another one is found
    names_sessions  in a header, which ours knows: its replicas go on with the very tokens of the turn before
    options         fields of each body
    """

    async def all_of_it() -> SessionPlayer:
        async with connect(server.url) as http:
            body = {"model": server.model, "temperature": 0, "ignore_eos": True, **options}

            async def ask(messages: list[dict[str, Any]], max_tokens: int, session: str) -> Answer:
                own = {"cache_salt": session} if is_alone else {}
                client = ChatClient(http, body | own, session_header=names_sessions, timeout_s=3600.0)
                return await client.ask(messages, max_tokens, session)

            load = SessionPlayer(ask)
            await load.play(sessions, num_users)
            return load

    before = server.counts()
    load = asyncio.run(all_of_it())
    counts = {name: value - before.get(name, 0.0) for name, value in server.counts().items()}
    figures = summarize(load.answers, {}, load.num_unsent)
    if figures["num_failed"] and not may_fail:
        raise RuntimeError(f"{figures['num_failed']} requests failed, the first: {figures['first_error']}")
    return Played(load.answers, figures, counts)


def words(seed: str, count: int) -> Piece:
    """Random common words, about a token each; the same for the same seed."""
    return Piece(seed, count)


class Passage(NamedTuple):
    """A text that is given, where a `Piece` is made."""

    content: str
    is_document: bool = False

    def text(self) -> str:
        return self.content


def alone(name: str, num_words: int, num_new: int, system: Piece | Passage | None = None, at_s: float = 0.0) -> Session:
    """A session of one turn."""
    return Session(name=name, turns=[Turn(pieces=(words(name, num_words),), max_tokens=num_new, at_s=at_s)],
                   system=system)  # fmt: skip


def told(played: Played) -> dict[str, Any]:
    """What points keep of a play."""
    figures = played.figures
    normalized = played.normalized_s()
    return rounded({
        "tok/s": figures["output_tokens_per_s"], "ttft_ms": figures["ttft_ms"]["p50"],
        "normalized_ms": 1e3 * sum(normalized) / len(normalized),
        "normalized_p90_ms": 1e3 * normalized[int(0.9 * (len(normalized) - 1))],
        "cached": figures["cached_share"], "prompt": figures["prompt_tokens"],
    })  # fmt: skip
