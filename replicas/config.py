"""Configuration of one engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mneme.cachetier.names import EvictionPolicyName
from mneme.config import check_range
from mneme.errors import ConfigError
from mneme.replicas.documents import BlendOptions
from mneme.replicas.truncation import Truncation

EMBEDDED_MODEL = "mneme-tiny"  # the one that comes with the package
GenerationConfigUse = Literal["auto", "none"]
MAX_TIMEOUT_S = 86_400.0  # of a request
MIN_TTL_S, MAX_TTL_S = 1.0, 365 * 86400.0  # of a pin


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPrompt:
    """A system prompt, as the chat template writes it before any user's message, or the beginning of a text."""

    system: str | None = None  # this, or:
    text: str | None = None  # the beginning of a prompt, as it is
    ttl_s: float | None = None  # how long it stays; None: as long as the engine

    def __post_init__(self) -> None:
        if bool(self.system) == bool(self.text):
            raise ConfigError("warm_prompts: each has either a system prompt or a text")
        if self.ttl_s is not None:
            check_range("warm_prompts: ttl_s", self.ttl_s, MIN_TTL_S, MAX_TTL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Configures one engine on one device. Sizes that are None are chosen from the model and the machine."""

    device: str = "auto"  # auto: a GPU if there is one; cpu, cuda, or cuda:1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = (
        "auto"  # of weights and KV; auto: bfloat16 where the device multiplies it, else float32
    )
    page_size: int = 32  # token slots per page; 64 gives wide tiles a kernel of their own on sm_90, and slower decodes
    num_pages: int | None = None  # None: from kv_cache_bytes
    kv_cache_bytes: int | None = None  # None: a share of the device's free memory, at most 1 GiB on a CPU
    host_cache_bytes: int | None = (
        None  # KV that left the device; 0: none; None: none on a CPU, else a share of the memory
    )
    copy_out_below: float = 0.5  # share of free or copied pages under which idle ones are copied to the host
    max_context: int | None = None  # tokens; None: the model's
    max_batch_tokens: int = 2048  # query rows per step: decodes and prefill chunks together
    # Of a step beside streams: parts of prompts take what decodes leave of it, at least a quarter. 0: none; None: 50,
    # or eight times what its decodes take if that is more. Where costs are known, as they are to replicas.
    max_step_ms: float | None = None
    max_running: int = 128  # sequences with pages
    max_waiting: int = 1024  # queued requests; more are refused with Overloaded
    # Of queued prompts together; None: no limit. Token ids take about 50 bytes each in Python: the default is 100 MB.
    max_waiting_tokens: int | None = 2**21
    request_timeout_s: float | None = None  # for requests that name none; None: no deadline
    prefix_sharing: bool = True  # false: nothing is shared or found again, as a measure of what that is worth
    eviction: EvictionPolicyName = "lookahead"  # which cached pages go first (docs/decisions/prefix-cache.md)
    share: Literal["auto", "always", "never"] = "auto"  # how attention treats shared segments
    cuda_graphs: bool = True  # replay steps of up to 2,048 rows as CUDA graphs; nothing on a CPU
    timeline: str | None = None  # file for trace events of layers and transfers; %p in it: the process id
    num_threads: int | None = None  # torch threads; None: what torch chooses
    session_ttl_s: float = 3600.0  # how long an idle session is kept
    max_sessions: int = 10_000  # 0: no request is part of a session
    max_session_tokens: int = 16_000_000  # in all token logs together; four bytes each
    # auto: what the model says of sampling holds where a request says nothing (generation_config.json).
    generation_config: GenerationConfigUse = "auto"
    warm_prompts: tuple[WarmPrompt, ...] = ()  # public: computed and pinned before there is traffic
    max_pins: int = 16  # of one API key, besides those
    max_pinned_share: float = 0.5  # of the pages, in all pins together
    blend: BlendOptions = field(default_factory=BlendOptions)  # of what a request does not say of its documents
    blend_report: str | None = None  # a quality report, or its folder; None: beside the model
    truncation: Truncation = field(default_factory=Truncation)  # of sessions that outgrow the context window

    def __post_init__(self) -> None:
        if self.page_size not in (16, 32, 64):
            raise ConfigError(f"engine.page_size: must be 16, 32 or 64 (got {self.page_size})")
        for name, low in (("num_pages", 2), ("kv_cache_bytes", 1), ("max_context", 1), ("num_threads", 1)):
            value = getattr(self, name)
            if value is not None:
                check_range(f"engine.{name}", value, low, 2**48)
        if self.host_cache_bytes is not None:
            check_range("engine.host_cache_bytes", self.host_cache_bytes, 0, 2**48)
        check_range("engine.copy_out_below", self.copy_out_below, 0, 1)
        check_range("engine.max_batch_tokens", self.max_batch_tokens, 16, 2**20)
        if self.max_step_ms is not None:
            check_range("engine.max_step_ms", self.max_step_ms, 0, 1e6)
        check_range("engine.max_running", self.max_running, 1, self.max_batch_tokens)  # a row for each decode
        check_range("engine.max_waiting", self.max_waiting, 1, 2**20)
        if self.max_waiting_tokens is not None:
            check_range("engine.max_waiting_tokens", self.max_waiting_tokens, 1, 2**40)
        if self.request_timeout_s is not None:
            check_range("engine.request_timeout_s", self.request_timeout_s, 0.001, MAX_TIMEOUT_S)
        check_range("engine.session_ttl_s", self.session_ttl_s, 0, 10**9)
        check_range("engine.max_sessions", self.max_sessions, 0, 10**9)
        check_range("engine.max_pins", self.max_pins, 0, 10**6)
        check_range("engine.max_pinned_share", self.max_pinned_share, 0, 1)
        check_range("engine.max_session_tokens", self.max_session_tokens, 0, 10**12)
