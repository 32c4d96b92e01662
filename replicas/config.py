"""Configuration of one engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mneme.cachetier.names import EvictionPolicyName
from mneme.config import check_range
from mneme.errors import ConfigError
from mneme.kernels.native.choice import CpuKernelsUse
from mneme.replicas.documents import BlendOptions
from mneme.replicas.truncation import Truncation

EMBEDDED_MODEL = "mneme-tiny"  # the one that comes with the package
WeightsForm = Literal["auto", "dense", "int8", "int4", "fp8"]
KvDtype = Literal["auto", "int8"]
GenerationConfigUse = Literal["auto", "none"]
MAX_TIMEOUT_S = 86_400.0  # of a request
MIN_TTL_S, MAX_TTL_S = 1.0, 365 * 86400.0  # of a pin


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Configures one engine on one device. Sizes that are None are chosen from the model and the machine."""

    device: str = "auto"  # auto: a GPU if there is one; cpu, cuda, or cuda:1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = (
        "auto"  # of weights and (see kv_dtype) KV; auto: bfloat16 where the device multiplies it faster, else float32
    )
    # Who multiplies and attends on a CPU; invariant: ours, so that a row's product has the same bits in every step;
    # fastest: for so many rows who is faster here, ours or torch (measured once); auto: fastest in bfloat16 alone.
    cpu_kernels: CpuKernelsUse = "auto"
    # What weights are multiplied as. auto: int8 or int4 where the checkpoint is quantized so and a kernel multiplies
    # them (on CPUs, with a compiler), else dense, in `dtype`. int8 and int4 round any checkpoint, int4 what leads into
    # MLPs to 4 bits and the rest to 8; fp8 does on GPUs (not measured). All of these round inputs to 8 bits.
    weights: WeightsForm = "auto"
    # What KV is stored as, in all tiers. int8: numbers of 8 bits with a scale for each token and KV head, 0.53 of
    # bfloat16's bytes (head_dim 64); auto: as dtype says.
    kv_dtype: KvDtype = "auto"
    page_size: int = 32  # token slots per page; 64 gives wide tiles a kernel of their own on sm_90, and slower decodes
    num_pages: int | None = None  # None: from kv_cache_bytes
    kv_cache_bytes: int | None = None  # None: a share of the device's free memory, at most 1 GiB on a CPU
    host_cache_bytes: int | None = (
        None  # KV that left the device; 0: none; None: none on a CPU, else a share of the memory
    )
    max_context: int | None = None  # tokens; None: the model's
    max_batch_tokens: int = 2048  # query rows per step: decodes and prefill chunks together
    # Of a step beside streams: parts of prompts take what decodes leave of it, at least a quarter. 0: none; None: 50,
    # or eight times what its decodes take if that is more. Where costs are known, as they are to replicas.
    max_step_ms: float | None = None
    max_running: int = 128  # sequences with pages
    max_waiting: int = 1024  # queued requests; more are refused with Overloaded
    request_timeout_s: float | None = None  # for requests that name none; None: no deadline
    prefix_sharing: bool = True  # false: nothing is shared or found again, as a measure of what that is worth
    eviction: EvictionPolicyName = "density"  # which cached pages go first (docs/decisions/prefix-cache.md)
    cuda_graphs: bool = True  # replay steps of up to 2,048 rows as CUDA graphs; nothing on a CPU
    timeline: str | None = None  # file for trace events of layers and transfers; %p in it: the process id
    num_threads: int | None = None  # torch threads; None: what torch chooses
    session_ttl_s: float = 3600.0  # how long an idle session is kept
    max_sessions: int = 10_000  # 0: no request is part of a session
    # auto: what the model says of sampling holds where a request says nothing (generation_config.json).
    generation_config: GenerationConfigUse = "auto"
    # System prompts that are computed and pinned before there is traffic, for all tenants: as the chat template writes
    # them before any user's message; of a model without one, how prompts begin.
    warm_prompts: tuple[str, ...] = ()
    blend: BlendOptions = field(default_factory=BlendOptions)  # of what a request does not say of its documents
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
        check_range("engine.max_batch_tokens", self.max_batch_tokens, 16, 2**20)
        if self.max_step_ms is not None:
            check_range("engine.max_step_ms", self.max_step_ms, 0, 1e6)
        check_range("engine.max_running", self.max_running, 1, self.max_batch_tokens)  # a row for each decode
        check_range("engine.max_waiting", self.max_waiting, 1, 2**20)
        if self.request_timeout_s is not None:
            check_range("engine.request_timeout_s", self.request_timeout_s, 0.001, MAX_TIMEOUT_S)
        if not all(self.warm_prompts):
            raise ConfigError("engine.warm_prompts: must not be empty texts")
        check_range("engine.session_ttl_s", self.session_ttl_s, 0, 10**9)
        check_range("engine.max_sessions", self.max_sessions, 0, 10**9)
