"""Weights from a local Hugging Face directory: one safetensors file or an index and its shards.

The header of each file is checked before any byte of a tensor is read: `safetensors` refuses offsets that overlap or
leave the file, and every name and shape must be the one that the configuration implies, so a hostile file can make
neither a large allocation nor a wrong model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from mneme.cachetier.host_pages.streams import CudaStreams, Event, Streams
from mneme.errors import CheckpointError, ConfigError, shown
from mneme.kernels.native.library import can_pack
from mneme.kernels.native.quantized import GROUP, Codes
from mneme.kernels.torch.fp8 import Fp8Codes, can_multiply, fp8_without_memory
from mneme.machine import available_bytes
from mneme.replicas.card import GGUF, read_json, shard_paths
from mneme.replicas.config import WeightsForm
from mneme.replicas.model.decoder_config import DecoderConfig
from mneme.replicas.model.directory import Progress, silent
from mneme.replicas.model.families.family import Family
from mneme.replicas.model.families.table import FAMILIES
from mneme.replicas.model.formats.gguf_file import ROTATIONS, GgufFile
from mneme.replicas.model.formats.observed import Observed, observe
from mneme.replicas.model.formats.quantized import QuantizedTensors
from mneme.replicas.model.parts import DecoderWeights
from mneme.replicas.model.tensors import Bits, Files, Linears, Quantized, Source, Tensors

_PIECE_BYTES = 8 << 20  # that is read and copied at once
_SMALL_BYTES = 1 << 20  # a tensor that is not worth a piece
_NUM_READERS = 4
_NUM_SPARE_POSITIONS = 2  # rows before OPT's first position
_UNUSED = ("rotary_emb.inv_freq", "lm_head.weight", *ROTATIONS)  # that old files have beside what they need


def load_weights(
    model_dir: Path,
    config: DecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Progress = silent,
    torch_rows: int | None = None,
    form: WeightsForm = "dense",
) -> DecoderWeights:
    """Read every tensor; raises `CheckpointError` that names the file and the tensor, or `ConfigError`.

    torch_rows  see `mneme.kernels.linear.PackedLinear`
    form        what matrices are multiplied as
    """
    family = FAMILIES[config.family]
    with ExitStack() as stack:
        files = open_files(model_dir, device, dtype, stack)
        form = multiplied_form(form, device, dtype)
        checked, trial = Checked(files, dtype), Linears(form)
        build(family, checked, config, linears=trial)
        checked.refuse_unread(family)
        squares = _squares(family, files, config, dtype) if trial.num_rounded_bytes["int4"] else ()
        return build(family, files, config, on_progress, Linears(form, torch_rows, squares))


def multiplied_form(form: WeightsForm, device: torch.device, dtype: torch.dtype) -> WeightsForm:
    """Return a form if something multiplies it on a device, else dense."""
    can = can_multiply(device, dtype) if form == "fp8" else can_pack(torch.empty(0, dtype=dtype, device=device))
    return form if can else "dense"


def _squares(family: Family, files: Files, config: DecoderConfig, dtype: torch.dtype) -> Sequence[torch.Tensor | None]:
    """Return the mean squares of the inputs of each product; the dense weights are gone then.

    Raises `ConfigError` if there is no memory for these.
    """
    needed = sum(build(family, Checked(files, dtype), config, linears=Linears()).num_bytes.values())
    if needed > (found := available_bytes()):
        rule = f"4 bits are rounded of the dense model, {needed / 2**30:.1f} GiB, and {found / 2**30:.1f} GiB are free"
        raise ConfigError(f"engine.weights: {rule}; int8 needs no such room")
    observed = Observed()
    observe(config, build(family, files, config, linears=observed))
    return observed.squares()


def count_bytes(model_dir: Path, config: DecoderConfig, dtype: torch.dtype, form: WeightsForm) -> DecoderWeights:
    """Return weights without memory that say what `load_weights` would take, by the files' headers.

    form  what matrices are multiplied as, where a kernel multiplies it; raises `CheckpointError`
    """
    with ExitStack() as stack:
        files = Checked(open_files(model_dir, torch.device("cpu"), dtype, stack), dtype)
        return build(FAMILIES[config.family], files, config, linears=Linears(form))


def build(
    family: Family,
    source: Source,
    config: DecoderConfig,
    on_progress: Progress = silent,
    linears: Linears | None = None,
) -> DecoderWeights:
    """Build a decoder of a source's tensors."""
    linears = linears or Linears()
    prefix = next((each for each in family.prefixes if source.has(each + family.embedding)), family.prefixes[0])
    tensors, hidden = Tensors(source, config, linears, prefix), config.hidden_size
    layers = []
    for index in range(config.num_layers):
        layers.append(family.layer(tensors.under(f"{family.layers}{index}."), config, index))
        on_progress("loading weights", (index + 1) / config.num_layers)
    of_head, name, embedding = tensors, family.embedding.removesuffix(".weight"), None
    if not config.tied_embeddings:
        embedding = tensors.tensor(family.embedding, config.vocab_size, hidden)
        of_head = tensors if tensors.has(family.head) else Tensors(source, config, linears)
        name = family.head.removesuffix(".weight")
    stored = of_head.quantized(name)
    head = of_head.matrix({name: config.vocab_size}, hidden, stored=stored, takes_fp8=False)
    positions = None
    if family.positions is not None:
        positions = tensors.tensor(family.positions, config.max_context + _NUM_SPARE_POSITIONS, hidden)
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        norm=family.norm(tensors, config),
        head=linears.make(head, stored=stored, takes_fp8=False),
        dtype=head.dtype,
        device=head.device,
        positions=None if positions is None else positions[_NUM_SPARE_POSITIONS:],
        num_bytes=dict(linears.num_bytes),
        num_rounded_bytes=linears.num_rounded_bytes.total(),
    )


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


def open_files(model_dir: Path, device: torch.device, dtype: torch.dtype, stack: ExitStack) -> Files:
    """Open a directory's weights, in whatever format they are."""
    if (model_dir / GGUF).exists():
        return GgufTensors(model_dir, device, dtype)
    files = SafetensorsFiles(model_dir, device, dtype, stack)
    quantization = read_json(model_dir / "config.json").get("quantization_config")
    if quantization is None or quantization.get("quant_method") == "mxfp4":  # which its family reads
        return files
    return QuantizedTensors(files, quantization, device, dtype)


class SafetensorsFiles:
    """Opens the shards of a directory and reads tensors by name."""

    def __init__(self, model_dir: Path, device: torch.device, dtype: torch.dtype, stack: ExitStack) -> None:
        self.model_dir, self._device, self._dtype, self._stack = model_dir, device, dtype, stack
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

    @property
    def names(self) -> Collection[str]:
        return self._file_by_name.keys()

    def has(self, name: str) -> bool:
        return name in self._file_by_name

    def check(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """See `Files`."""
        path, handle = self._lookup(name)
        found = tuple(handle.get_slice(name).get_shape())
        if found != shape:
            raise CheckpointError(f"{path}: {name} has shape {list(found)}, config.json implies {list(shape)}")
        return (name,)

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return a tensor's shape, and its dtype as safetensors calls it."""
        _, handle = self._lookup(name)
        part = handle.get_slice(name)
        return tuple(part.get_shape()), str(part.get_dtype())

    def tensor(self, name: str, *_shape: int) -> torch.Tensor:
        """See `Source`; the shape has been checked."""
        tensor = self.read(name)
        if not tensor.dtype.is_floating_point:
            path, _ = self._lookup(name)
            raise CheckpointError(f"{path}: {name} has dtype {tensor.dtype}; weights must be floating point")
        return self._there(tensor).to(self._dtype)

    def stored(self, name: str, *_shape: int) -> torch.Tensor:
        """See `Source`."""
        tensor = self.read(name)
        if tensor.dtype is not torch.uint8:
            path, _ = self._lookup(name)
            raise CheckpointError(f"{path}: {name} has dtype {tensor.dtype}; must be uint8")
        return self._there(tensor)

    def quantized(self, _name: str) -> None:
        """See `Source`."""

    def codes(self, _name: str, _bits: Bits, *_shape: int) -> None:
        """See `Source`."""

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._upload is not None and tensor.nbytes > _SMALL_BYTES:
            return self._upload(tensor)
        return tensor.to(self._device)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as it is in its file."""
        path, handle = self._lookup(name)
        try:
            tensor: torch.Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read ({error})") from error
        return tensor

    def _lookup(self, name: str) -> tuple[Path, Any]:
        found = self._file_by_name.get(name)
        if found is None:
            raise CheckpointError(f"{self.model_dir}: tensor {name} is missing")
        return found


class GgufTensors:
    """Reads a GGUF file's tensors by the names of its family, dequantized."""

    def __init__(self, model_dir: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.model_dir, self._device, self._dtype = model_dir, device, dtype
        self._file = GgufFile(model_dir / GGUF)
        self._name_of = self._file.names_of()

    @property
    def names(self) -> Collection[str]:
        return self._file.tensors.keys()

    def has(self, name: str) -> bool:
        return self._name_of(name)[0] in self._file.tensors

    def check(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """See `Files`; of the tensor of all experts one is a part."""
        stored, expert = self._name_of(name)
        info = self._file.tensors.get(stored)
        if info is None:
            raise CheckpointError(f"{self._file.path}: tensor {name} is missing")
        found = info.shape if expert is None else info.shape[1:]
        if found != shape or (expert is not None and expert >= info.shape[0]):
            rule = f"has shape {list(info.shape)}, its metadata implies {list(shape)}"
            raise CheckpointError(f"{self._file.path}: {stored} {rule}")
        return (stored,)

    def tensor(self, name: str, *_shape: int) -> torch.Tensor:
        """See `Source`."""
        stored, expert = self._name_of(name)
        array = self._file.array(stored, expert)
        return torch.from_numpy(np.require(array, requirements=("C", "W"))).to(self._device, self._dtype)

    def stored(self, name: str, *_shape: int) -> torch.Tensor:
        """See `Source`."""
        raise CheckpointError(f"{self._file.path}: {name} is not offered")

    def quantized(self, name: str) -> Quantized | None:
        """See `Source`."""
        found = self._file.bits(self._name_of(name)[0])
        return None if found is None else Quantized(*found)

    def codes(self, name: str, bits: Bits, *shape: int) -> Codes | None:
        """See `Source`."""
        if bits == "fp8":
            return None
        stored, expert = self._name_of(name)
        found = self._file.codes(stored, bits, expert)
        if found is None:
            return None
        values, scales, minima = (None if each is None else torch.from_numpy(each) for each in found)
        assert values is not None
        assert scales is not None
        return Codes(values, scales, minima, shape[-1], self._dtype)


class Checked:
    """Checks names and shapes, and gives tensors without memory: a `Source` to build a model of on trial."""

    def __init__(self, files: Files, dtype: torch.dtype) -> None:
        self._files, self._dtype = files, dtype
        self._unread = set(files.names)

    def has(self, name: str) -> bool:
        return self._files.has(name)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        self._unread.difference_update(self._files.check(name, shape))
        return torch.empty(shape, dtype=self._dtype, device="meta")

    def stored(self, name: str, *shape: int) -> torch.Tensor:
        return self.tensor(name, *shape).to(torch.uint8)

    def quantized(self, name: str) -> Quantized | None:
        return self._files.quantized(name)

    def codes(self, name: str, bits: Bits, *shape: int) -> Codes | Fp8Codes:
        self._unread.difference_update(self._files.check(name, shape))
        rows, columns = shape
        if bits == "fp8":
            return fp8_without_memory(rows, columns, self._dtype)
        values = torch.empty((rows, -(-columns // GROUP), GROUP), dtype=torch.uint8, device="meta")
        halves = values.new_empty(values.shape[:2], dtype=torch.float16)
        return Codes(values, halves, halves if bits == 4 else None, columns, self._dtype)

    def refuse_unread(self, family: Family) -> None:
        """Raise `CheckpointError` for tensors that have no place in the model."""
        beginnings = family.ignored
        unread = [n for n in sorted(self._unread) if not n.endswith(_UNUSED) and not n.startswith(beginnings)]
        if unread:
            rule = f"{len(unread)} tensors have no place in this model ({shown(unread[0])}...)"
            raise CheckpointError(f"{self._files.model_dir}: {rule}")
