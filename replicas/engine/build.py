"""Makes a running engine from a model name: files, device, dtype, pool size, costs, cache tier."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mneme.cache_folder import cache_folder, locked
from mneme.cachetier.chunk.fingerprint import ChunkLayout, ModelFingerprint, weights_digest
from mneme.cachetier.config import CacheConfig, warn_of_few_chunks
from mneme.cachetier.names import PUBLIC_SALT, tenant_id
from mneme.cachetier.node.sources import DEFAULT_HOST_BYTES, ProcessChunkStore
from mneme.cachetier.pin_book import PinName
from mneme.cachetier.policy.cost_model import CostFile, CostModel
from mneme.cachetier.session_log.log import open_session_logs
from mneme.cachetier.store import ChunkStore
from mneme.errors import CheckpointError, ConfigError, InvalidRequest, MnemeError, Overloaded
from mneme.kernels.arguments import row_size
from mneme.kernels.native import library as native_library
from mneme.kernels.native.choice import OURS, CpuKernels, CpuKernelsUse, is_invariant
from mneme.kernels.page_table import KV_SCALE_BYTES
from mneme.kernels.triton.configs import MAX_GROUPS, MIN_CAPABILITY
from mneme.machine import available_bytes
from mneme.primitives import Workers
from mneme.replicas.blend.first_report import FirstReport, measuring
from mneme.replicas.blend.gate import measured_on, read_gate
from mneme.replicas.card import sampling_defaults, shard_paths
from mneme.replicas.config import EngineConfig, KvDtype, WeightsForm
from mneme.replicas.connector.connector import KvConnector
from mneme.replicas.connector.device_pages import make_chunk_pages
from mneme.replicas.connector.save import ChunkSaver
from mneme.replicas.connector.step_load import ChunkLoader
from mneme.replicas.engine.calibration import machine_of, remembered_costs
from mneme.replicas.engine.choice import machine_choice
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.loop import EngineLoop
from mneme.replicas.engine.stats import StartReport, rss_bytes
from mneme.replicas.engine.warm_up import largest_step_bytes, warm_up
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.decoder_config import DecoderConfig
from mneme.replicas.model.directory import Progress, load_model_config, model_directory, silent
from mneme.replicas.model.graphs import step_graphs_for
from mneme.replicas.model.parts import DecoderWeights
from mneme.replicas.model.runner import Runner
from mneme.replicas.model.timeline import Timeline
from mneme.replicas.model.weights import count_bytes, load_weights, multiplied_form
from mneme.replicas.sessions.durable import OpenSessionLogs, open_durable_sessions
from mneme.replicas.text.prompts import conversation_prefix
from mneme.replicas.text.tokenizer import Tokenizer
from mneme.replicas.truncation import Immovable, default_for

logger = logging.getLogger(__name__)

_CPU_POOL_BYTES = 1 << 30
_CPU_POOL_SHARE = 0.1  # of the memory that is available now
_TIER_SHARE = 0.1  # likewise, for the cache tier of this process alone
_HOST_SHARE = 0.25  # of the memory that is available now, for KV that left a GPU; of all engines of the machine
_HOST_BYTES = 64 << 30  # at most, of one engine: pinning takes 0.2 to 0.3 s a GiB, beside what is served first
_HOST_POOLS = 4  # times the device pool: more is rarely of use
_GPU_POOL_SHARE = 0.8  # of what is free once the weights are loaded, before the largest step was measured
_GPU_SPARE_SHARE = 0.05  # of the GPU, behind that: what steps measured none of, and the allocator's pieces
_GPU_DRIVER_BYTES = 3 << 29  # of an engine that has a part of a GPU, outside of torch's count: its context, its graphs
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CALIBRATION_S = 5.0  # at most, when a model is first served on a machine
# How long, when it ends; the others stand elsewhere.
_ROUNDING = 3  # of weights; counts up when the numbers of a form change, so that KV of the former ones is not found
_NOT_IN_KV = ("max_context", "eos_token_ids", "dtype", "rope", "local_rope")

OpenStore = Callable[[CacheConfig, ModelFingerprint], ChunkStore]


def build_engine(
    model: str,
    config: EngineConfig,
    *,
    on_progress: Progress | None = None,
    tokenizer: Tokenizer | None = None,
    device_share: float = 1.0,
    machine_share: float = 1.0,
    cache: CacheConfig | None = None,
    open_store: OpenStore | None = None,
    open_session_logs: OpenSessionLogs = open_session_logs,
) -> Engine:
    """Load weights and tokenizer, build an engine, and warm the configured prompts.

    device_share   what part of the GPU this engine has; others may have the rest
    machine_share  likewise of the machine's memory

    `cache`: of the tier under the engine, which `open_store` opens (None: one of this process alone), with logs of
    sessions; None: there is none, and steps are not bounded by time, as for batches, which nobody waits beside.
    Raises `CheckpointError` or `ConfigError`.
    """
    model_dir = model_directory(model)
    model_config = load_model_config(model_dir)
    defaults = sampling_defaults(model_dir, config.generation_config)
    device = choose_device(config.device)
    start = StartReport(rss_bytes if device.type == "cpu" else lambda: torch.cuda.memory_reserved(device))

    def report(stage: str, share: float, num_bytes: int | None = None) -> None:
        start.end_phase(stage, num_bytes)
        (on_progress or silent)(stage, share)

    tokenizer = tokenizer or Tokenizer.load(model_dir)
    report("tokenizer", 1.0)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    if device.type == "cpu":
        compiled_kernels()  # the first time takes as long as a compiler does
        report("CPU kernels", 1.0)
    check_capability(device)
    check_heads(model_config, device)
    dtype = choose_dtype(config.dtype, device, model_config.dtype)
    kv_dtype = choose_kv_dtype(config.kv_dtype, device, dtype, model_config.head_dim)
    kernels = choose_kernels(config.cpu_kernels, device, dtype)
    report("kernel timings", 1.0)
    with _fitting("model: its weights do not", device):
        # Memory in use counts what was read and dropped, and pages of files.
        counted = partial(report, num_bytes=0)
        weights = load_weights(model_dir, model_config, device, dtype, counted, kernels.product_rows, config.weights)
    report("loading weights", 1.0, weights.num_all_bytes)
    form = form_of(config.weights, weights.num_bytes)

    def decoder_of(num_pages: int) -> Decoder:
        """No sequence outgrows the pool, so a file that claims a huge context costs no huge rotary table."""
        max_context = min(config.max_context or model_config.max_context, num_pages * config.page_size)
        return Decoder(model_config, weights, max_context=max_context, kernels=kernels)

    num_pages = choose_num_pages(config, model_config, device, kv_dtype, device_share)
    if device.type == "cuda" and config.num_pages is None and config.kv_cache_bytes is None:
        with _fitting("engine.max_batch_tokens: a step of so many does not", device):
            step_bytes = largest_step_bytes(decoder_of(num_pages), kv_dtype, tokenizer, config, report)
        num_pages = choose_num_pages(config, model_config, device, kv_dtype, device_share, step_bytes)
    decoder = decoder_of(num_pages)
    make_graphs = step_graphs_for(decoder, config.max_running, config.max_batch_tokens) if config.cuda_graphs else None
    num_host_pages = choose_num_host_pages(config, model_config, device, kv_dtype, num_pages, machine_share)
    timeline = None if config.timeline is None else Timeline()
    with _fitting("engine.num_pages, kv_cache_bytes: the pool does not", device):
        runner = Runner(
            decoder, num_pages, config.page_size, make_graphs,
            kv_dtype=kv_dtype, num_host_pages=num_host_pages, timeline=timeline,
        )  # fmt: skip
    report("pools", 1.0, num_pages * _page_bytes(config, model_config, kv_dtype))  # memory that is touched later
    if timeline is not None and config.timeline is not None:  # when the engine goes, at exit at the latest
        weakref.finalize(runner, timeline.write, config.timeline.replace("%p", str(os.getpid())))
    with _fitting("engine.max_batch_tokens: a step of so many does not", device):
        warm_up(runner, tokenizer, config, report)
    report("warm-up", 1.0)
    connector, durable, costs, keep_costs = None, None, None, None
    if cache is not None:  # costs are of steps as they will be served, with graphs
        file = _costs_file(runner, config, cache, model_config, dtype, form)
        if cache.enabled and config.prefix_sharing:
            fingerprint = model_fingerprint(
                model_dir, model_config, dtype, form,
                kv_dtype=kv_dtype, chunk_tokens=cache.chunk_tokens, memory=_kept_folder() / "weights.json",
            )  # fmt: skip
            connector = open_cache_tier(runner, config, cache, file, fingerprint, report, open_store)
            weights_name = connector.fingerprint.weights
            durable = open_durable_sessions(config, cache, weights_name, runner.vocab_size, open_session_logs)
            report("cache tier", 1.0)
        costs = _costs(runner, config, cache, file) if connector is None else connector.costs
        report("calibration", 1.0)
        keep_costs = partial(file.write, costs)
    eos_token_ids = tuple(dict.fromkeys((*model_config.eos_token_ids, *tokenizer.eos_token_ids)))
    kept = _kept_folder()
    fingerprint_of = partial(
        model_fingerprint, model_dir, model_config, dtype, form, kv_dtype=kv_dtype, memory=kept / "weights.json"
    )
    reports = partial(
        read_gate,
        (model_dir, kept),
        lambda: measured_on(fingerprint_of() if connector is None else connector.fingerprint),
    )
    gate, first_report = reports(), None
    is_asked = cache is not None and config.blend.mode == "auto" and model_config.immovable is None
    if is_asked and not gate.has_report and kept.is_dir():  # an engine of batches is not there when the report is
        name = str(dtype).removeprefix("torch.")
        # Whoever rounds to 4 bits has the dense weights first: at most so many times what they take then.
        times = {"int4": 4, "int8": 2} if form == "int4" else {}
        dense_bytes = sum(size * times.get(kind, 1) for kind, size in weights.num_bytes.items())
        first_report = FirstReport(
            measuring(model, name, form, config.kv_dtype, kept), folder=kept, read=reports, weights_bytes=dense_bytes
        )
    engine = Engine(
        runner, tokenizer, config,
        eos_token_ids=eos_token_ids, max_new_tokens=defaults.get("max_tokens"), connector=connector, costs=costs,
        durable=durable, gate=gate, first_report=first_report, on_close=keep_costs, start_phases=start.phases,
    )  # fmt: skip
    check_default_truncation(config, engine.max_context, immovable=model_config.immovable)
    if config.warm_prompts:
        warm_before_traffic(engine, tokenizer, config.warm_prompts)
        report("prompts", 1.0)
    matrices = described_bytes(weights)
    told = "loaded %s in %s; dtype %s, matrices: %s, KV in %s, kernels: %s; documents: %s"
    logger.info(told, model_dir, start, runner.dtype, matrices, runner.kv_dtype, runner.kernels, gate.described())
    return engine


def check_default_truncation(config: EngineConfig, window: int, *, immovable: Immovable | None = None) -> None:
    """Raise `ConfigError` if the configured truncation could not work in a window of so many tokens.

    immovable  why KV of the model cannot be moved
    """
    try:
        truncation = default_for(config.truncation, immovable)
        truncation.check_window(window)
        truncation.check_model(immovable)
    except InvalidRequest as error:
        raise ConfigError(f"engine.{error}") from None


def expected_weights(model_dir: Path, config: DecoderConfig, device: str, form: WeightsForm) -> DecoderWeights:
    """Return what weights would take on "cuda" or "cpu" as they are served, by the files' headers."""
    dtype = choose_dtype("auto", torch.device(device), config.dtype)
    return count_bytes(model_dir, config, dtype, multiplied_form(form, torch.device(device), dtype))


def described_bytes(weights: DecoderWeights) -> str:
    """Say what matrices take by their format, and how much of that is not as the checkpoint has it."""
    by_format = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sorted(weights.num_bytes.items()))
    rounded = weights.num_rounded_bytes
    return f"{by_format}; {rounded / 2**20:.0f} MiB rounded at the start" if rounded else by_format


def compiled_kernels() -> str | None:
    """Path of the compiled CPU kernels, built now if they are not yet; None where torch has to do."""
    found = native_library.library()
    return None if found is None else found._name


def build_engine_loop(model: str, config: EngineConfig, *, node: str = "", **options: Any) -> EngineLoop:
    """Call `build_engine` on the thread that will step the engine; the loop is not yet started. `node`: see there.

    What a thread has of its own (OpenMP's workers, buffers of steps on a GPU) is warm then too.
    """
    thread = Workers("engine", 1)
    return EngineLoop(thread.call(lambda: build_engine(model, config, **options)), thread, node=node)


def choose_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is a device, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"engine.device: must be auto, cpu or cuda[:index] (got {name!r})") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device: must be auto, cpu or cuda[:index] (got {name!r})")
    if device.type == "cuda" and (trouble := cuda_trouble()) is not None:
        raise ConfigError(f"engine.device: {name!r} cannot be used: {trouble}; engine.device: cpu serves without a GPU")
    return device


def check_capability(device: torch.device) -> None:
    """Raise `ConfigError` for a GPU that is too old for the kernels."""
    if device.type != "cuda" or (found := torch.cuda.get_device_capability(device)) >= MIN_CAPABILITY:
        return
    versions = (".".join(map(str, version)) for version in (found, MIN_CAPABILITY))
    raise ConfigError(
        "engine.device: {} has compute capability {}, the kernels are for {} and later (A100, L4, H100, H200); "
        "engine.device: cpu serves without a GPU".format(torch.cuda.get_device_name(device), *versions)
    )


def cuda_trouble() -> str | None:
    """Say why torch has no GPU here, and what helps; None where it has one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build; install one for CUDA (docs/serving.md, CPU or CUDA)"
    shown = "`nvidia-smi` shows GPUs and their driver: update an old one"
    return f"torch finds no GPU that its CUDA {torch.version.cuda} can use; {shown}"


def check_heads(model: DecoderConfig, device: torch.device) -> None:
    """Raise `CheckpointError` for heads that attention on CUDA would have to leave to torch, several times slower."""
    if device.type == "cuda" and model.num_q_heads > MAX_GROUPS * model.num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads: on CUDA at most {MAX_GROUPS} for each of num_key_value_heads "
            f"(got {model.num_q_heads} for {model.num_kv_heads}); engine.device: cpu serves such a model"
        )


def choose_dtype(name: str, device: torch.device, checkpoint: str) -> torch.dtype:
    """ "auto" is bfloat16 where a GPU multiplies it and where a CPU was measured to be faster in it, else float32; on a
    CPU a float32 checkpoint stays as it is.

    checkpoint  what config.json says the weights are
    """
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    is_half = checkpoint in ("bfloat16", "float16")
    return _DTYPES[machine_choice().half_dtype] if is_half else torch.float32


def choose_kv_dtype(name: KvDtype, device: torch.device, dtype: torch.dtype, head_dim: int) -> torch.dtype:
    """What a pool holds: int8 where that is asked for, else `dtype`.

    Raises `ConfigError` for int8 rows on a GPU whose scales would lie where no float32 can be read.
    """
    if name != "int8":
        return dtype
    if device.type != "cpu" and head_dim % KV_SCALE_BYTES:
        raise ConfigError(
            f"engine.kv_dtype: int8 KV on a GPU: {KV_SCALE_BYTES} must divide the model's head_dim, {head_dim}; "
            "auto stores it as engine.dtype"
        )
    return torch.int8


def choose_kernels(use: CpuKernelsUse, device: torch.device, dtype: torch.dtype) -> CpuKernels:
    """Choose who computes on a CPU, by timings that are made where none are kept and they decide anything."""
    name = str(dtype).removeprefix("torch.")
    if device.type != "cpu" or is_invariant(use, name):
        return OURS
    return machine_choice().kernels(name)


def form_of(wanted: WeightsForm, num_bytes: Mapping[str, int]) -> WeightsForm:
    """Return the form that weights have by now: dense where auto rounded none; its name is part of what KV depends on.

    Raises `ConfigError` where nothing multiplies the form that was asked for.
    """
    if wanted not in ("auto", "dense", *num_bytes):
        of_ints = "a CPU, a C++ compiler, and engine.dtype float32 or bfloat16"
        rule = "a GPU of compute capability 8.9 or later, and engine.dtype bfloat16" if wanted == "fp8" else of_ints
        raise ConfigError(f"engine.weights: {wanted} needs {rule}; dense serves the model here")
    return wanted if {"int8", "int4", "fp8"} & num_bytes.keys() else "dense"


def choose_num_pages(
    config: EngineConfig,
    model: DecoderConfig,
    device: torch.device,
    kv_dtype: torch.dtype,
    device_share: float = 1.0,
    step_bytes: int | None = None,
) -> int:
    """Pages in the pool: as configured, or as many as free memory holds, at most what is of use.

    step_bytes  what the largest step takes beside the pool, on a GPU; None: not known yet, a guess will do
    """
    if config.num_pages is not None:
        return config.num_pages
    page_bytes = _page_bytes(config, model, kv_dtype)
    budget = config.kv_cache_bytes or _free_bytes(device, device_share, step_bytes)
    num_pages = max(0, int(budget // page_bytes))
    if num_pages < 2 and not config.kv_cache_bytes and device.type == "cuda":
        raise ConfigError(f"model: no room for KV is left beside its weights on {_described(device)}")
    if num_pages < 2:
        raise ConfigError(f"engine.kv_cache_bytes: {budget} bytes hold {num_pages} pages of {page_bytes}; needs 2")
    return num_pages if config.kv_cache_bytes else min(num_pages, _useful_pages(config, model))


def choose_num_host_pages(
    config: EngineConfig,
    model: DecoderConfig,
    device: torch.device,
    kv_dtype: torch.dtype,
    num_pages: int,
    machine_share: float = 1.0,
) -> int:
    """Host pages: as configured; else none on a CPU, whose pool is in the same memory, and on a GPU as many as a share
    of the machine's memory holds, at most some times the pool. None without sharing: nothing is cached then."""
    if not config.prefix_sharing:
        return 0
    page_bytes = _page_bytes(config, model, kv_dtype)
    if config.host_cache_bytes is not None:
        return int(config.host_cache_bytes // page_bytes)
    if device.type == "cpu":
        return 0
    budget = min(available_bytes() * _HOST_SHARE * machine_share, _HOST_BYTES)
    return min(int(budget // page_bytes), _HOST_POOLS * num_pages)


def _page_bytes(config: EngineConfig, model: DecoderConfig, kv_dtype: torch.dtype) -> int:
    row_bytes = row_size(model.head_dim, kv_dtype) * kv_dtype.itemsize
    return 2 * model.num_layers * model.num_kv_heads * config.page_size * row_bytes


def _useful_pages(config: EngineConfig, model: DecoderConfig) -> int:
    """Count pages for every running sequence with its whole context, and as many again for what is cached."""
    context = min(model.max_context, config.max_context or model.max_context)
    return 2 * config.max_running * (-(-context // config.page_size) + 1)


def _free_bytes(device: torch.device, device_share: float, step_bytes: int | None) -> float:
    """Bytes that KV may take. An engine's part of a GPU is of all its memory: others may come later and take theirs.

    A step counts twice: graphs have memory of their own, static logits among it.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        room = float(free)
        if device_share < 1:
            room = min(room, total * device_share - torch.cuda.memory_reserved(device) - _GPU_DRIVER_BYTES)
        if step_bytes is None:
            return room * _GPU_POOL_SHARE
        return room - 2 * step_bytes - total * device_share * _GPU_SPARE_SHARE
    return _cpu_pool_bytes(available_bytes())


def _cpu_pool_bytes(free: float) -> float:
    return min(free * _CPU_POOL_SHARE, _CPU_POOL_BYTES)


def expected_pool(device: str, weights_bytes: int) -> tuple[float, float]:
    """Bytes that are free on "cuda" or "cpu", and those that KV would have of them once weights are loaded."""
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return free, max(0.0, (free - weights_bytes) * _GPU_POOL_SHARE)
    free = available_bytes()
    return free, max(0.0, _cpu_pool_bytes(free - weights_bytes))


@contextlib.contextmanager
def _fitting(what: str, device: torch.device) -> Iterator[None]:
    """Turns memory that a GPU does not have into a `ConfigError` that names what does not fit."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise ConfigError(f"{what} fit {_described(device)}") from None


def _described(device: torch.device) -> str:
    free, total = torch.cuda.mem_get_info(device)
    size = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return f"the GPU ({torch.cuda.get_device_name(device)}, {size}); it needs a larger one, or one of its own"


def open_cache_tier(
    runner: Runner,
    engine: EngineConfig,
    cache: CacheConfig,
    file: CostFile,
    fingerprint: ModelFingerprint,
    report: Progress,
    open_store: OpenStore | None = None,
) -> KvConnector:
    """Open the tier that `open_store` gives, or one of this process alone; the runner moves chunks from then on.

    Called before there is traffic. Raises `ConfigError` or `CheckpointError`.
    """
    chunk_bytes = fingerprint.layout.chunk_bytes
    if cache.disk is not None:
        warn_of_few_chunks("cache.disk.capacity_bytes", cache.disk.capacity_bytes, chunk_bytes)
    if open_store is None:
        share = max(DEFAULT_HOST_BYTES, int(_TIER_SHARE * available_bytes()))
        cache = replace(cache, host_bytes=share if cache.host_bytes is None else cache.host_bytes)
        warn_of_few_chunks("cache.host_bytes", cache.host_bytes or 0, chunk_bytes)
        store: ChunkStore = ProcessChunkStore(cache)
    else:
        store = open_store(cache, fingerprint)
    report("cache tier", 1.0)
    try:  # the store has made the folder
        costs = _costs(runner, engine, cache, file, None if cache.disk is None else Path(cache.disk.folder))
    except BaseException:
        store.close()
        raise
    report("calibration", 1.0)
    return connect(runner, store, fingerprint, costs, cache)


def connect(
    runner: Runner,
    store: ChunkStore,
    fingerprint: ModelFingerprint,
    costs: CostModel,
    config: CacheConfig,
) -> KvConnector:
    """Let an engine load chunks of a store into its runner's pool, and save them from there."""
    layout = fingerprint.layout
    loaded, saved = (make_chunk_pages(runner.pool, layout.layer_bytes(layout.chunk_tokens)) for _ in range(2))
    loader = ChunkLoader(layout.num_layers, loaded)
    saver = ChunkSaver(store, fingerprint, saved, learn_save=costs.learn_save)
    runner.use_chunks(loader, saver)
    return KvConnector(
        store,
        fingerprint,
        costs,
        config,
        loader=loader,
        saver=saver,
        page_size=runner.page_size,
    )


def _costs_file(
    runner: Runner,
    engine: EngineConfig,
    cache: CacheConfig,
    model: DecoderConfig,
    dtype: torch.dtype,
    form: WeightsForm,
) -> CostFile:
    """Name where costs of a disk and of all models of one shape are kept: what weights are changes no step's time."""
    disk = None if cache.disk is None or not cache.enabled else cache.disk.folder
    kept_as = [] if runner.kv_dtype == runner.dtype else [runner.kv_dtype]
    what = [asdict(model), str(dtype), form, cache.chunk_tokens, disk, *kept_as]
    shape = json.dumps(what, sort_keys=True, default=repr)
    return CostFile(_kept_folder(), hashlib.blake2b(shape.encode()).digest()[:32], machine_of(runner, engine))


def _costs(
    runner: Runner, engine: EngineConfig, cache: CacheConfig, file: CostFile, disk_folder: Path | None = None
) -> CostModel:
    """Measure or read costs; processes that start at once do so one after the other, and the later ones read."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # then they measure beside each other
            held.enter_context(locked(file.path.with_name("costs.lock")))
        return remembered_costs(
            runner, engine, file, chunk_tokens=cache.chunk_tokens, disk_folder=disk_folder, budget_s=_CALIBRATION_S
        )


def _kept_folder() -> Path:
    """Return where digests and costs are kept from start to start; for a user without a home they are not."""
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("digests and costs are not kept: %s", error)
        return Path(os.devnull)
    return folder


def chunk_layout(config: DecoderConfig, kv_dtype: torch.dtype, chunk_tokens: int) -> ChunkLayout:
    """Return how chunks of a model's KV lie in memory."""
    return ChunkLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=str(kv_dtype).removeprefix("torch."),
        chunk_tokens=chunk_tokens,
    )


def model_fingerprint(
    model_dir: Path,
    config: DecoderConfig,
    dtype: torch.dtype,
    form: WeightsForm = "dense",
    *,
    kv_dtype: torch.dtype | None = None,
    chunk_tokens: int = 256,
    memory: Path | None = None,
) -> ModelFingerprint:
    """Identify all that a model's KV depends on. Reads every weight file once.

    `dtype` and `form` are what the engine computes in, `kv_dtype` what it stores (None: `dtype`); `memory`: see
    `weights_digest`.
    """
    # A field that families got later changes the fingerprint of those alone that have it.
    defaults = {field.name: field.default for field in fields(config)}
    given = {name: value for name, value in asdict(config).items() if name not in _NOT_IN_KV}
    architecture = {name: value for name, value in given.items() if value != defaults[name]}
    architecture |= {} if form == "dense" else {"weights": form, "rounding": _ROUNDING}
    architecture |= {} if kv_dtype in (None, dtype) else {"computed_in": str(dtype).removeprefix("torch.")}
    ropes = [rope for rope in (config.rope, config.local_rope) if rope is not None]
    return ModelFingerprint(
        weights=weights_digest(shard_paths(model_dir), memory),
        layout=chunk_layout(config, kv_dtype or dtype, chunk_tokens),
        inv_freq=tuple(frequency for rope in ropes for frequency in rope.inv_freq),
        attention_factor=math.prod(rope.attention_factor for rope in ropes),
        architecture=json.dumps(architecture, sort_keys=True),
    )


def warm_before_traffic(engine: Engine, tokenizer: Tokenizer, prompts: Sequence[str]) -> None:
    """Compute and pin the configured prompts for all tenants; raises `ConfigError` if one cannot be."""
    names: list[tuple[int, PinName]] = []
    for index, prompt in enumerate(prompts):
        ids = _warm_ids(tokenizer, prompt, index)
        names.append((index, PinName(tenant_id(PUBLIC_SALT), f"configured-{index}")))
        _begin_warming(engine, names[-1], tuple(ids))
    while engine.has_work:
        engine.step()
    for index, name in names:
        described = engine.pins.describe(name)
        if described is not None and described.error is not None:
            raise ConfigError(f"engine.warm_prompts[{index}]: {described.error}")


def _begin_warming(engine: Engine, named: tuple[int, PinName], ids: tuple[int, ...]) -> None:
    index, name = named
    while True:
        try:
            return engine.pins.warm(name, PUBLIC_SALT, ids, is_configured=True)
        except (InvalidRequest, Overloaded) as error:
            if isinstance(error, InvalidRequest) or not engine.has_work:
                raise ConfigError(f"engine.warm_prompts[{index}]: {error}") from None
        engine.step()  # others wait already: their turn first


def _warm_ids(tokenizer: Tokenizer, prompt: str, index: int) -> list[int]:
    try:
        if not tokenizer.has_chat_template:
            return tokenizer.encode(prompt, add_special_tokens=True)
        messages = [{"role": "system", "content": prompt}]
        return conversation_prefix(tokenizer.render_chat, tokenizer.encode_rendered, messages)
    except MnemeError as error:
        raise ConfigError(f"engine.warm_prompts[{index}]: {error}") from None
