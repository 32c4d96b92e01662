"""Weights from a local Hugging Face directory: one safetensors file or an index and its shards.

The header of each file is checked before any byte of a tensor is read: `safetensors` refuses offsets that overlap or
leave the file, and every name and shape must be the one that the configuration implies, so a hostile file can make
neither a large allocation nor a wrong model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from mneme.cachetier.pages.streams import CudaStreams, Event, Streams
from mneme.errors import CheckpointError, shown
from mneme.kernels.linear import Linear, make_linear
from mneme.replicas.card import shard_paths
from mneme.replicas.model.config import DecoderConfig

_PIECE_BYTES = 8 << 20  # that is read and copied at once
_SMALL_BYTES = 1 << 20  # a tensor that is not worth a piece
_NUM_READERS = 4
Progress = Callable[[str, float], None]  # (what is being done, share done from 0 to 1)


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """One layer; projections that read the same input are one matrix."""

    attn_norm: torch.Tensor  # [hidden]
    qkv: Linear  # hidden -> q_size + 2 kv_size
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    o: Linear  # q_size -> hidden
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 intermediate
    down: Linear  # intermediate -> hidden


@dataclass(slots=True, kw_only=True)
class DecoderWeights:
    """All tensors of a decoder on one device, in one dtype."""

    embedding: torch.Tensor | None  # [vocab, hidden]; None where it is tied to the head
    layers: list[LayerWeights]
    norm: torch.Tensor  # [hidden]
    head: Linear  # hidden -> vocab

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, hidden]"""
        if self.embedding is None:
            return self.head.weight_rows(token_ids)
        return F.embedding(token_ids, self.embedding)


def load_weights(
    model_dir: Path,
    config: DecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Progress = lambda _what, _share: None,
) -> DecoderWeights:
    """Read every tensor; raises `CheckpointError` that names the file and the tensor."""
    with ExitStack() as stack:
        reader = _Reader(model_dir, device, dtype, stack)
        reader.check_shapes(_expected_shapes(config))
        layers = []
        for index in range(config.num_layers):
            layers.append(_read_layer(reader, config, index))
            on_progress("loading weights", (index + 1) / config.num_layers)
        embedding = reader.tensor("model.embed_tokens.weight")
        tied = config.tied_embeddings
        return DecoderWeights(
            embedding=None if tied else embedding,
            layers=layers,
            norm=reader.tensor("model.norm.weight"),
            head=make_linear(embedding if tied else reader.tensor("lm_head.weight")),
        )


def _read_layer(reader: _Reader, config: DecoderConfig, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}."
    attn, mlp = prefix + "self_attn.", prefix + "mlp."

    def projection(stem: str, names: tuple[str, ...], with_bias: bool) -> Linear:
        weights = [reader.tensor(f"{stem}{name}.weight") for name in names]
        biases = [reader.tensor(f"{stem}{name}.bias") for name in names] if with_bias else None
        return make_linear(torch.cat(weights), None if biases is None else torch.cat(biases))

    return LayerWeights(
        attn_norm=reader.tensor(prefix + "input_layernorm.weight"),
        qkv=projection(attn, ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
        q_norm=reader.tensor(attn + "q_norm.weight") if config.qk_norm else None,
        k_norm=reader.tensor(attn + "k_norm.weight") if config.qk_norm else None,
        o=projection(attn, ("o_proj",), config.o_bias),
        mlp_norm=reader.tensor(prefix + "post_attention_layernorm.weight"),
        gate_up=projection(mlp, ("gate_proj", "up_proj"), config.mlp_bias),
        down=projection(mlp, ("down_proj",), config.mlp_bias),
    )


def _expected_shapes(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that will be read, with its shape; lazily, as the layer count is not yet trusted."""
    hidden, inner = config.hidden_size, config.intermediate_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    attention = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        for name, size in attention.items():
            yield f"{prefix}self_attn.{name}.weight", (size, hidden)
            if config.qkv_bias:
                yield f"{prefix}self_attn.{name}.bias", (size,)
        yield prefix + "self_attn.o_proj.weight", (hidden, config.q_size)
        if config.o_bias:
            yield prefix + "self_attn.o_proj.bias", (hidden,)
        if config.qk_norm:
            yield prefix + "self_attn.q_norm.weight", (config.head_dim,)
            yield prefix + "self_attn.k_norm.weight", (config.head_dim,)
        for name, rows, columns in (
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
        ):
            yield f"{prefix}mlp.{name}.weight", (rows, columns)
            if config.mlp_bias:
                yield f"{prefix}mlp.{name}.bias", (rows,)


class Upload:
    """Brings tensors of a mapped file to a device: threads read pieces into pinned memory, which is copied meanwhile.

    From memory that is not pinned the driver copies alone, at the speed of one thread and of the file.
    """

    def __init__(self, streams: Streams, readers: Executor, piece_bytes: int = _PIECE_BYTES) -> None:
        self._streams, self._stream, self._readers, self._piece_bytes = streams, streams.new(), readers, piece_bytes
        # Pinned memory, and when the device has copied what was in it.
        self._buffers = SimpleQueue[tuple[torch.Tensor, Event | None]]()
        for _ in range(2 * _NUM_READERS):
            self._buffers.put((streams.host_memory(piece_bytes), None))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, for the stream that computes."""
        found = self._streams.empty(tuple(tensor.shape), tensor.dtype)
        self._stream.wait(self._streams.current().record())  # others may have had its memory
        source, target = (each.reshape(-1).view(torch.uint8) for each in (tensor, found))
        pieces = [slice(start, start + self._piece_bytes) for start in range(0, len(source), self._piece_bytes)]
        list(self._readers.map(lambda piece: self._copy(source[piece], target[piece]), pieces))
        self._streams.current().wait(self._stream.record())
        return found

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        buffer, copied = self._buffers.get()
        if copied is not None:
            copied.wait()
        staged = buffer[: len(source)].copy_(source)

        def launch() -> None:
            target.copy_(staged, non_blocking=True)

        self._stream.run(launch)
        self._buffers.put((buffer, self._stream.record()))


class _Reader:
    """Opens the shards and reads tensors by name."""

    def __init__(self, model_dir: Path, device: torch.device, dtype: torch.dtype, stack: ExitStack) -> None:
        self._model_dir, self._device, self._dtype, self._stack = model_dir, device, dtype, stack
        self._upload: Upload | None = None
        if device.type == "cuda":
            self._upload = Upload(CudaStreams(device), stack.enter_context(ThreadPoolExecutor(_NUM_READERS)))
        self._file_by_name: dict[str, tuple[Path, Any]] = {}
        for path in shard_paths(model_dir):
            handle = self._open(path)
            self._file_by_name.update(dict.fromkeys(handle.keys(), (path, handle)))

    def _open(self, path: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(path, framework="pt"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file") from None
        except (SafetensorError, OSError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{path}: not a sound safetensors file ({error})") from error

    def check_shapes(self, expected: Iterator[tuple[str, tuple[int, ...]]]) -> None:
        """Every expected tensor is there with its shape, and none that nothing would read."""
        unread = set(self._file_by_name)
        for name, shape in expected:
            path, handle = self._lookup(name)
            found = tuple(handle.get_slice(name).get_shape())
            if found != shape:
                raise CheckpointError(f"{path}: {name} has shape {list(found)}, config.json implies {list(shape)}")
            unread.discard(name)
        ignored = {name for name in unread if not name.endswith("rotary_emb.inv_freq") and name != "lm_head.weight"}
        if ignored:
            first = sorted(ignored)[0]
            raise CheckpointError(
                f"{self._model_dir}: {len(ignored)} tensors have no place in this model ({shown(first)}...)"
            )

    def tensor(self, name: str) -> torch.Tensor:
        path, handle = self._lookup(name)
        try:
            tensor: torch.Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read ({error})") from error
        if not tensor.dtype.is_floating_point:
            raise CheckpointError(f"{path}: {name} has dtype {tensor.dtype}; weights must be floating point")
        if self._upload is not None and tensor.nbytes > _SMALL_BYTES:
            tensor = self._upload(tensor)
        return tensor.to(device=self._device, dtype=self._dtype)

    def _lookup(self, name: str) -> tuple[Path, Any]:
        found = self._file_by_name.get(name)
        if found is None:
            raise CheckpointError(f"{self._model_dir}: tensor {name} is missing")
        return found
