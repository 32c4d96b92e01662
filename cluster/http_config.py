"""Configuration of the HTTP API: who may call it, and how much one client may take."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mneme.config import check_range
from mneme.errors import ConfigError

_HEADER_NAME = re.compile(r"[A-Za-z0-9-]+")
# What clients send with all requests of a conversation or an agent: aiperf, OpenCode, Codex, Claude Code, Dynamo, SMG,
# LiteLLM.
AFFINITY_HEADERS = (
    "X-Correlation-ID",
    "X-Session-Affinity",
    "session-id",
    "x-claude-code-session-id",
    "X-Dynamo-Session-ID",
    "X-SMG-Routing-Key",
    "x-litellm-session-id",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Bounds on what one client can make this process hold or wait for."""

    api_keys: tuple[str, ...] = ()  # empty: everyone may call, and all share one tenant
    max_body_bytes: int = 8 * 2**20
    max_held_body_bytes: int = 256 * 2**20  # of all requests whose bodies are being read
    max_header_bytes: int = 32 * 2**10
    body_timeout_s: float = 60.0  # from the headers to the last byte of the body
    body_idle_timeout_s: float = 10.0  # between two pieces of it
    client_stall_timeout_s: float = 60.0  # how long a client may leave a stream unread
    affinity_headers: tuple[str, ...] = AFFINITY_HEADERS  # one value, one replica; the first that is given counts
    shutdown_grace_s: float = 0.5  # how long answers go on when the server stops; then they end with an error
    max_connections_per_address: int = 512  # of the proxy's 4,096; in IPv6 of a /64. `mneme serve` alone

    def __post_init__(self) -> None:
        check_range("http.max_body_bytes", self.max_body_bytes, 1024, 2**30)
        check_range("http.max_held_body_bytes", self.max_held_body_bytes, self.max_body_bytes, 2**40)
        check_range("http.max_header_bytes", self.max_header_bytes, 1024, 2**20)
        check_range("http.max_connections_per_address", self.max_connections_per_address, 1, 2**20)
        for name in ("body_timeout_s", "body_idle_timeout_s", "client_stall_timeout_s"):
            check_range(f"http.{name}", getattr(self, name), 0.01, 86_400)
        check_range("http.shutdown_grace_s", self.shutdown_grace_s, 0, 86_400)
        if not all(key.strip() == key and key.isascii() and key for key in self.api_keys):
            raise ConfigError("http.api_keys: each key is ASCII text without spaces around it")
        if not all(_HEADER_NAME.fullmatch(name) for name in self.affinity_headers):
            raise ConfigError("http.affinity_headers: each is the name of a header, of letters, digits and -")
