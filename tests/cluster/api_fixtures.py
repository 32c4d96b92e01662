"""An API over a `FakeEngineClient`: in this event loop, or behind a real server on 127.0.0.1."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
import yaml
from starlette.testclient import TestClient

from mneme.cluster.api_keys import ApiKey
from mneme.cluster.config import HttpConfig
from mneme.cluster.http.api import build_api
from mneme.cluster.http.api_state import Backend, ServedModel
from mneme.cluster.serve.http_protocol import HttpProtocol
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.replicas.tiny_tokenizer import tiny_tokenizer

MODEL = ServedModel(id="tiny", max_context=1024, created=1_700_000_000)
TOKENIZER = tiny_tokenizer()
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "the fox"}]}
RENDERED = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"  # CHAT through the template
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "the fox", "max_tokens": 100}


def api(engine: FakeEngineClient | None = None, **config: Any) -> TestClient:
    """HTTP without a network: whole answers only."""
    engine = engine or FakeEngineClient(TOKENIZER)
    return TestClient(build_api([Backend(engine, MODEL, engine.tokenizer)], HttpConfig(**config)), "http://api")


def post(
    path: str, body: Any, *, engine: FakeEngineClient | None = None, headers: Any = None, **config: Any
) -> httpx.Response:
    return api(engine, **config).post(path, json=body, headers=headers)


def get(path: str, *, engine: FakeEngineClient | None = None, headers: Any = None, **config: Any) -> httpx.Response:
    return api(engine, **config).get(path, headers=headers)


def keys_file(folder: Path, *keys: ApiKey) -> str:
    """Write tenants' keys as `http.keys_file` has them."""
    path = folder / "keys.yaml"
    named = [{name: value for name, value in asdict(key).items() if value is not None} for key in keys]
    path.write_text(yaml.safe_dump({"keys": named}))
    return str(path)


def body_of(response: httpx.Response, status: int = 200) -> Any:
    """What it says, if its status is this one."""
    assert response.status_code == status, response.text
    return response.json()


def chat(**changes: Any) -> httpx.Response:
    return post("/v1/chat/completions", {**CHAT, **changes})


@dataclass
class Server:
    url: str
    port: int
    engine: FakeEngineClient
    loop: asyncio.AbstractEventLoop

    def call(self, function: Any) -> Any:
        """Run a plain function on the server's event loop, where the engine lives."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)

    def wait_idle(self) -> None:
        """Until nothing runs in the engine."""
        self._wait(self.engine.idle)

    def wait_busy(self) -> None:
        """Until something runs in the engine."""
        self._wait(self.engine.busy)

    def wait_running(self, count: int) -> None:
        """Until so many requests run in the engine at once."""
        while self.call(lambda: len(self.engine.running)) < count:
            pass

    def allow_steps(self, count: int) -> None:
        """Let an engine with a gate do so many steps."""
        assert self.engine.gate is not None
        for _ in range(count):
            self.call(self.engine.gate.release)

    def _wait(self, event: asyncio.Event) -> None:
        async def wait() -> None:
            async with asyncio.timeout(30):
                await event.wait()

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result(60)


@contextlib.contextmanager
def serving(
    *, config: HttpConfig | None = None, engine: FakeEngineClient | None = None, **engine_options: Any
) -> Iterator[Server]:
    """A uvicorn server in a thread, over this engine or one of these options."""
    # asyncio turns Nagle's algorithm off only where the protocol is named: else each answer waits 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    started = threading.Event()
    servers: list[Server] = []
    stop: list[uvicorn.Server] = []

    async def main() -> None:
        client = engine or FakeEngineClient(TOKENIZER, **engine_options)
        app = build_api([Backend(client, MODEL, TOKENIZER)], config)
        server = uvicorn.Server(uvicorn.Config(app, http=HttpProtocol, log_level="critical", lifespan="off", ws="none"))
        servers.append(Server(f"http://127.0.0.1:{port}", port, client, asyncio.get_running_loop()))
        stop.append(server)
        started.set()
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    started.wait(30)
    try:
        yield servers[0]
    finally:
        stop[0].should_exit = True
        stop[0].force_exit = True
        thread.join(30)
        listener.close()
