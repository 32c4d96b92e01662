"""Options of vLLM that Mneme has under another name or not at all: what `LLM(...)` and `mneme serve` do about them."""

from __future__ import annotations

from typing import Any, NamedTuple

from mneme.errors import ConfigError, shown


class Foreign(NamedTuple):
    """An option of vLLM's. A flag whose place a key takes, or a value that the key takes as it is, sets it.

    Other values than `anyway` are refused.
    """

    instead: str  # a key of the engine's configuration, or a sentence
    anyway: tuple[str, ...] = ()  # as text: what is done in any case
    is_flag: bool = False
    is_opposite: bool = False  # of the key
    is_same: bool = False  # the key takes its values


_REPLICAS = "an engine has one device, and `mneme serve --replicas N` runs several engines"
_TLS = "TLS is a proxy's in front, or a Gateway's"
FOREIGN = {
    "block_size": Foreign("page_size", is_same=True),
    "chat_template": Foreign("it is the model's own"),
    "compilation_config": Foreign("kernels are compiled, and graphs captured, when it starts"),
    "data_parallel_size": Foreign(_REPLICAS, ("1",)),
    "disable_log_requests": Foreign("prompts are never logged", ("true",), True),
    "disable_log_stats": Foreign("figures are at /metrics", ("true",), True),
    "distributed_executor_backend": Foreign(_REPLICAS),
    "download_dir": Foreign("HF_HOME says where the hub's files lie"),
    "enable_auto_tool_choice": Foreign("in its place: http.tool_call_parser: none", ("true",), True),
    "enable_chunked_prefill": Foreign("long prompts are always computed in parts", ("true",), True),
    "enable_expert_parallel": Foreign(_REPLICAS, ("false",), True),
    "enable_lora": Foreign("adapters are not supported", ("false",), True),
    "enable_prefix_caching": Foreign("prefix_sharing", is_flag=True),
    "enforce_eager": Foreign("cuda_graphs", is_flag=True, is_opposite=True),
    "gpu_memory_utilization": Foreign("kv_cache_bytes"),
    "kv_cache_dtype": Foreign("kv_dtype", ("auto",)),
    "kv_cache_memory_bytes": Foreign("kv_cache_bytes", is_same=True),
    "kv_transfer_config": Foreign("in its place: cache.disk: KV is shared between replicas and nodes by itself"),
    "load_format": Foreign("weights are safetensors", ("auto", "safetensors")),
    "max_logprobs": Foreign("a request may ask for 20", ("20",)),
    "max_model_len": Foreign("max_context", is_same=True),
    "max_num_batched_tokens": Foreign("max_batch_tokens", is_same=True),
    "max_num_seqs": Foreign("max_running", is_same=True),
    "pipeline_parallel_size": Foreign(_REPLICAS, ("1",)),
    "quantization": Foreign("a checkpoint's own is found, and multiplied as engine.weights says", ("none",)),
    "revision": Foreign("the hub's newest is read; another one is a directory that you fetched"),
    "root_path": Foreign("a proxy in front takes a prefix away"),
    "seed": Foreign("each request has its own: SamplingParams(seed=...)"),
    "speculative_config": Foreign("speculation is not supported", ("none",)),
    "ssl_certfile": Foreign(_TLS),
    "ssl_keyfile": Foreign(_TLS),
    "swap_space": Foreign("host_cache_bytes"),
    "tensor_parallel_size": Foreign(_REPLICAS, ("1",)),
    "tokenizer": Foreign("it is the model's own"),
    "trust_remote_code": Foreign("no code of a model is run", ("false",), True),
}


def engine_keys(name: str, value: object, option: str, form: str) -> dict[str, Any]:
    """Return the keys that an option of `FOREIGN` sets: none if what it asks for is done anyway.

    form  how a key is given, such as "--set engine.{}=..."

    Raises `ConfigError`, with what takes the option's place.
    """
    foreign = FOREIGN[name]
    is_key = foreign.instead.isidentifier()
    if is_key and foreign.is_flag and isinstance(value, bool):
        return {foreign.instead: value != foreign.is_opposite}
    if foreign.is_same:
        return {foreign.instead: value}
    if str(value).lower() in foreign.anyway:
        return {}
    place = f"in its place: {form.format(foreign.instead)}" if is_key else foreign.instead
    raise ConfigError(f"{option}: is not supported (got {shown(value)}); {place}")
