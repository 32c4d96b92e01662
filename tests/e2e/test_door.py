"""Who takes connections and gives nothing loses them, and takes them from nobody else."""

from __future__ import annotations

import select
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from tests.cluster.bad_request_checks import check_error_object
from tests.e2e.conftest import CONNECTIONS, KEY
from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.e2e

NUM_HELD = 300
PATIENCE_S = 60.0
# Of an answered connection. 5 s are promised, and the rest is for a busy machine; the proxy alone would wait for 65 s.
CLOSED_S = 30.0
GREEDY, OTHER = "127.0.0.2", "127.0.0.3"
AUTHORIZED = f"Authorization: Bearer {KEY}\r\n"
JSON = "Content-Type: application/json\r\n"
CHAT = "POST /v1/chat/completions"
LISTENING = "0A"  # in /proc/net/tcp


@pytest.fixture(scope="module")
def address(small_process: ServerProcess) -> tuple[str, int]:
    url = httpx.URL(small_process.await_ready())
    return url.host, url.port or 80


def connect(address: tuple[str, int], source: str) -> socket.socket:
    return socket.create_connection(address, PATIENCE_S, source_address=(source, 0))


def answers(address: tuple[str, int], source: str) -> bool:
    """Whether a client at `source` is answered."""
    host, port = address
    with httpx.Client(transport=httpx.HTTPTransport(local_address=source), timeout=PATIENCE_S) as client:
        try:
            return client.get(f"http://{host}:{port}/ready").status_code == 200
        except httpx.TransportError:
            return False


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        (CHAT, JSON + "Content-Length: 100\r\n", 401),
        (CHAT, JSON + "Transfer-Encoding: chunked\r\n", 401),
        (CHAT, AUTHORIZED + JSON + "Content-Length: 99999999\r\n", 413),
        (CHAT, AUTHORIZED + JSON + "Content-Length: 100\r\n", 408),
        ("GET /v1/models", AUTHORIZED + "Content-Length: 100\r\n", 200),
        ("HEAD /health", f"Content-Length: {2**32}\r\n", 400),
        ("HEAD /health", "Transfer-Encoding: chunked\r\n", 400),
    ],
)
def test_an_answer_ends_the_connection_of_a_body_that_never_comes(
    address: tuple[str, int], request_line: str, headers: str, status: int
) -> None:
    with connect(address, GREEDY) as connection:
        connection.sendall(f"{request_line} HTTP/1.1\r\nHost: door\r\n{headers}\r\n".encode())
        begin = connection.recv(65536)
        answered_s = time.monotonic()
        rest = b"".join(iter(lambda: connection.recv(65536), b""))
        assert time.monotonic() - answered_s < CLOSED_S
    head, _, body = (begin + rest).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    if request_line.startswith("HEAD"):
        assert body == b""
    elif status != 200:
        check_error_object(body)


def test_http_2_cannot_keep_an_answered_connection(address: tuple[str, int]) -> None:
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    with connect(address, GREEDY) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_a_connection_whose_refused_body_came_is_used_again(address: tuple[str, int]) -> None:
    refused = f"{CHAT} HTTP/1.1\r\nHost: door\r\n{JSON}Content-Length: 2\r\n\r\n".encode()
    with connect(address, OTHER) as connection:
        for _ in range(2):
            connection.sendall(refused)
            connection.sendall(b"{}")
            received = b""
            while not received.endswith(b"}}"):
                part = connection.recv(65536)
                assert part, received
                received += part
            assert received.startswith(b"HTTP/1.1 401 ")


def test_one_address_cannot_hold_all_connections(address: tuple[str, int]) -> None:
    with ExitStack() as stack:
        held = []
        for _ in range(NUM_HELD):
            with suppress(ConnectionResetError):
                held.append(stack.enter_context(connect(address, GREEDY)))
        deadline = time.monotonic() + PATIENCE_S
        while len(held) - len(select.select(held, [], [], 1.0)[0]) > CONNECTIONS:  # readable: closed
            assert time.monotonic() < deadline
        assert len(held) >= CONNECTIONS
        assert answers(address, OTHER)
    while not answers(address, GREEDY):  # once the proxy has seen that they are gone
        assert time.monotonic() < deadline


def test_nothing_listens_beyond_this_machine(small_process: ServerProcess, address: tuple[str, int]) -> None:
    inodes = set()
    for pid in small_process.processes():
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(str(descriptor.readlink()))
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and f"socket:[{inode}]" in inodes:
                listening.append(local)
    assert f"0100007F:{address[1]:04X}" in listening
    loopback = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
    assert [local for local in listening if local.split(":")[0] not in loopback] == []
