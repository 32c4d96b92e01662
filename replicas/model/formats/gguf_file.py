"""GGUF files: one file that has a model's weights, configuration, tokenizer and chat template.

`card_of` writes the latter three once as the files of a model directory, beside a link to the weights, which are read
where they are: dequantized tensor by tensor to the engine's dtype (the `gguf` package knows the formats). A file's
counts and sizes are compared with its length before anything is made of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mneme.errors import CheckpointError, shown
from mneme.replicas.card import GGUF

FloatArray = npt.NDArray[np.float32]
Array = npt.NDArray[Any]
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
ROTATIONS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")  # no weights of layers
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
logger = logging.getLogger(__name__)

_KINDS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS"),
)
# Kinds in groups of 32, each with a scale that kernels have, too: the bits in which they are multiplied as they are.
_CODED: dict[str, tuple[Literal[4, 8], ...]] = {"Q4_0": (4, 8), "Q4_1": (4,), "Q4_K": (4,), "Q8_0": (8,)}
_BLOCK = 32
_UNWARNED = np.errstate(invalid="ignore", over="ignore")  # what is no number is refused by name
_MAX_DIMS = 4
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_HEADS_BY_PART = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
# What a configuration calls the keys behind an architecture's name.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}


class Dialect(NamedTuple):
    """Says how files of one architecture differ from the family's own checkpoints."""

    model_type: str
    more: Mapping[str, Any] = {}
    turns_pairs: bool = False  # rows of queries and keys lie for rotations of neighbours
    has_whole_norms: bool = False  # 1 is added to norms already


_DIALECTS = {
    "llama": Dialect("llama", turns_pairs=True),
    "mixtral": Dialect("mixtral", turns_pairs=True),  # files say llama, and have experts
    "qwen2": Dialect("qwen2"),
    "qwen3": Dialect("qwen3"),
    "qwen3moe": Dialect("qwen3_moe", {"norm_topk_prob": True}),
    "gemma2": Dialect("gemma2", has_whole_norms=True),
    "gemma3": Dialect("gemma3_text", has_whole_norms=True),
    "phi3": Dialect("phi3"),
}


class TensorInfo(NamedTuple):
    """Tells where a tensor lies."""

    shape: tuple[int, ...]  # rows first
    kind: int  # of ggml's quantizations
    start: int
    num_bytes: int


class GgufFile:
    """Reads a file's metadata and tensors; raises `CheckpointError` for one that is not sound."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        self._place = 0
        try:
            self.metadata, self.tensors = self._header()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise CheckpointError(f"{path}: not a sound GGUF file ({error})") from error
        name = self.metadata.get("general.architecture")
        self.architecture = str(name)
        known = self.architecture
        if known == "llama" and self.metadata.get("llama.expert_count"):
            known = "mixtral"
        if known not in _DIALECTS:
            names = ", ".join(sorted(_DIALECTS.keys() - {"mixtral"}))
            raise CheckpointError(f"{path}: general.architecture must be one of {names} (got {shown(name)})")
        self.dialect = _DIALECTS[known]

    def bits(self, name: str) -> tuple[Literal[4, 8], tuple[Literal[4, 8], ...]] | None:
        """Return in how many bits a tensor's numbers are multiplied, 4 or 8, and in which `codes` gives them.

        None: they are not in equal steps.
        """
        if name not in self.tensors:  # which is said when it is read
            return None
        kind = self._kind(name)
        found = re.match(r"Q(\d)_", kind)  # the others are floats, or of a table's numbers
        return None if found is None else (4 if found[1] == "4" else 8, _CODED.get(kind, ()))

    @_UNWARNED
    def codes(self, name: str, bits: int, expert: int | None = None) -> tuple[Array, Array, Array | None] | None:
        """Return a matrix's numbers in groups of 32: uint8 [N, G, 32], scales and, in 4 bits, minima float16 [N, G].

        See `mneme.kernels.native.quantized.Codes`. None: what the file has would have to be rounded to so many bits.
        """
        kind, (raw, shape) = self._kind(name), self._raw(name, expert)
        if bits not in _CODED.get(kind, ()):
            return None
        rows, num_groups = shape[0], shape[1] // _BLOCK
        if kind == "Q4_K":
            import gguf

            blocks = raw.reshape(rows, num_groups // 8, -1)  # of 8 groups: two factors, 6 bits of each group, numbers
            factors = blocks[..., :4].copy().view(np.float16).astype(np.float32).reshape(-1, 2)
            parts = gguf.quants.Q4_K.get_scale_min(blocks[..., 4:16].reshape(-1, 12))
            scales, minima = (part.astype(np.float32) * factors[:, i : i + 1] for i, part in enumerate(parts))
            pairs = blocks[..., 16:].reshape(rows, -1, 1, _BLOCK)  # of groups
            found = np.concatenate((pairs & 15, pairs >> 4), 2), scales.astype(np.float16), -minima.astype(np.float16)
        else:
            blocks = raw.reshape(rows, num_groups, -1)
            num_halves = 2 if kind == "Q4_1" else 1
            halves = blocks[..., : 2 * num_halves].copy().view(np.float16)
            values = blocks[..., 2 * num_halves :]
            if kind != "Q8_0":  # the first 16 numbers, then the others
                values = np.concatenate((values & 15, values >> 4), 2)
            if bits == 8:
                values = values + np.uint8(120 if kind == "Q4_0" else 128)
            minima = halves[..., 1] if kind == "Q4_1" else -8 * halves[..., 0]
            found = values, halves[..., 0], minima
        if not all(np.isfinite(each).all() for each in found[1:]):
            raise self._unsound(name)
        values, scales, minima = (
            self._in_order(name, each.reshape(rows, num_groups, *end))
            for each, end in zip(found, ((_BLOCK,), (), ()), strict=True)
        )
        return values, scales, None if bits == 8 else minima

    @_UNWARNED
    def array(self, name: str, expert: int | None = None) -> FloatArray:
        """Return a tensor dequantized, as the family's own checkpoints have it: float32, rows first.

        expert  the part of a tensor of all experts; None: all of it
        """
        import gguf  # here: it brings all of its tables along

        raw, shape = self._raw(name, expert)
        kind = gguf.GGMLQuantizationType(self.tensors[name].kind)
        width = raw.size // prod(shape[:-1])
        found: FloatArray = gguf.dequantize(raw.reshape(-1, width), kind).reshape(shape).astype(np.float32, copy=False)
        if not np.isfinite(found.sum(dtype=np.float64)):
            raise self._unsound(name)
        return found - 1 if self.dialect.has_whole_norms and "norm" in name else self._in_order(name, found)

    def _unsound(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name} has a number or a scale that is NaN, infinite or too large")

    def _kind(self, name: str) -> str:
        import gguf

        return str(gguf.GGMLQuantizationType(self.tensors[name].kind).name)

    def _raw(self, name: str, expert: int | None) -> tuple[Array, tuple[int, ...]]:
        """Return the bytes of a tensor, or of an expert's part of it, and its shape."""
        info = self.tensors[name]
        raw = np.frombuffer(self._bytes, np.uint8, info.num_bytes, info.start)
        if expert is None:
            return raw, info.shape
        return raw.reshape(info.shape[0], -1)[expert], info.shape[1:]

    def _in_order(self, name: str, rows: Array) -> Array:
        """Put rows of queries and keys as the family has them."""
        heads = _HEADS_BY_PART.get(name.split(".")[-2])
        if not self.dialect.turns_pairs or heads is None:
            return rows
        num_heads = self.metadata[f"{self.architecture}.{heads}"]
        pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    def names_of(self) -> Callable[[str], tuple[str, int | None]]:
        """Return what tells a tensor's name here by its name in the family, and of which expert it is a part."""
        import gguf

        architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        num_layers = self.metadata.get(f"{self.architecture}.block_count", 0)
        # A file that lies of its layers has no tensors for most of them.
        table = gguf.get_tensor_name_map(architecture, min(num_layers, len(self.tensors)))

        def name_of(name: str) -> tuple[str, int | None]:
            found = _EXPERT.search(name)
            joined = name if found is None else name.replace(found[0], ".experts.")
            return table.get_name(joined, (".weight", ".bias")) or name, None if found is None else int(found[1])

        return name_of

    def config(self) -> dict[str, Any]:
        """Return what the `config.json` of the same model says, as far as the engine reads it."""
        metadata, found = self.metadata, {"model_type": self.dialect.model_type, **self.dialect.more}
        for key, name in _FIELDS.items():
            value = metadata.get(f"{self.architecture}.{key}")
            if value is not None:
                found[name] = value
        if self.dialect.model_type == "mixtral":
            found["num_local_experts"] = found.pop("num_experts")
        if "token_embd.weight" not in self.tensors:
            raise CheckpointError(f"{self.path}: tensor token_embd.weight is missing")
        found.setdefault("vocab_size", self.tensors["token_embd.weight"].shape[0])
        found |= self._attention(found)
        found["tie_word_embeddings"] = "output.weight" not in self.tensors
        found["eos_token_id"] = metadata.get("tokenizer.ggml.eos_token_id")
        found["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
        kinds = {info.kind for name, info in self.tensors.items() if name.endswith(".weight")}
        found["torch_dtype"] = "float32" if kinds == {0} else "bfloat16"
        return {**found, **self._rope(found)}

    def _attention(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Read how many dimensions of a head are rotated, and how its scores are scaled, where the default is another.

        Gemma's files do not say the latter: in its 27B models it is by the hidden size's part of a head, else by the
        head's own size.
        """
        found: dict[str, Any] = {}
        hidden, num_heads = config.get("hidden_size"), config.get("num_attention_heads")
        if not (type(hidden) is int and type(num_heads) is int and hidden > 0 and num_heads > 0):
            return found  # said where the configuration is read
        head_dim = config.get("head_dim", hidden // num_heads)
        num_rotated = self.metadata.get(f"{self.architecture}.rope.dimension_count", head_dim)
        if num_rotated != head_dim and type(num_rotated) is int:
            found["partial_rotary_factor"] = num_rotated / head_dim
        if config["model_type"] in _LAYERS_OF_27B:
            is_27b = config.get("num_hidden_layers") == _LAYERS_OF_27B[config["model_type"]]
            found["query_pre_attn_scalar"] = hidden / num_heads if is_27b else head_dim
        return found

    def _rope(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Read how rotations are stretched: by a factor, by YaRN, or by a factor for each frequency, in a tensor."""
        at = f"{self.architecture}.rope.scaling."
        kind = self.metadata.get(f"{at}type", "none")
        original = self.metadata.get(f"{at}original_context_length")
        factors = next((n for n in ("rope_freqs.weight", "rope_factors_short.weight") if n in self.tensors), None)
        if factors is not None:
            of_short = factors.startswith("rope_factors")
            length = original if of_short and original else config["max_position_embeddings"]
            scaling = {"rope_type": "longrope", "short_factor": self.array(factors).tolist()}
            more = {} if of_short else {"attention_factor": 1.0}
            return {"rope_scaling": {**scaling, **more}, "original_max_position_embeddings": length}
        if kind in ("none", None):
            return {}
        if kind not in ("linear", "yarn"):
            raise CheckpointError(f"{self.path}: {at}type: must be none, linear or yarn (got {shown(kind)})")
        scaling = {"rope_type": kind, "factor": self.metadata.get(f"{at}factor")}
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        return {"rope_scaling": scaling}

    def _header(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._bytes[:4] != _MAGIC:
            raise CheckpointError(f"{self.path}: not a GGUF file: it does not begin with {_MAGIC.decode()}")
        self._place = 4
        version, num_tensors, num_fields = self._read("IQQ")
        if version not in _VERSIONS:
            raise CheckpointError(f"{self.path}: GGUF version {version}; must be {' or '.join(map(str, _VERSIONS))}")
        metadata: dict[str, Any] = {}
        for _ in range(self._count(num_fields, 12)):
            key = self._text()
            metadata[key] = self._value(self._read("I")[0])
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 16:
            raise CheckpointError(f"{self.path}: general.alignment: must be a small integer (got {shown(alignment)})")
        listed = [self._tensor() for _ in range(self._count(num_tensors, 24))]
        import gguf  # here: it brings all of its tables along

        start = -(-self._place // alignment) * alignment
        known = {gguf.GGMLQuantizationType[name] for name in _KINDS}
        sizes = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items() if kind in known}
        placed = {name: self._placed(name, info, start, sizes) for name, info in listed}
        end, before = start, ""
        for name, info in sorted(placed.items(), key=lambda each: each[1].start):
            if info.start < end or (info.start - start) % alignment:
                where = f"lies at byte {info.start}"
                rule = f"within {shown(before)}" if info.start < end else f"which is no multiple of {alignment}"
                raise CheckpointError(f"{self.path}: {shown(name)} {where}, {rule}")
            end, before = info.start + info.num_bytes, name
        return metadata, placed

    def _tensor(self) -> tuple[str, TensorInfo]:
        name = self._text()
        (num_dims,) = self._read("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise CheckpointError(f"{self.path}: {shown(name)} has {num_dims} dimensions")
        shape = self._read(f"{num_dims}Q")[::-1]
        kind, offset = self._read("IQ")
        return name, TensorInfo(shape, kind, offset, 0)

    def _placed(self, name: str, info: TensorInfo, start: int, sizes: Mapping[int, tuple[int, int]]) -> TensorInfo:
        """Return where in the file it is; raises `CheckpointError` for one that is not inside.

        sizes  numbers and bytes of a block, of each kind
        """
        if info.kind not in sizes:
            kinds = ", ".join(_KINDS)
            raise CheckpointError(f"{self.path}: {shown(name)} is of kind {info.kind}; must be one of {kinds}")
        per_block, block_bytes = sizes[info.kind]
        begin, num_bytes = start + info.start, prod(info.shape) // per_block * block_bytes
        if not prod(info.shape) or info.shape[-1] % per_block or begin + num_bytes > len(self._bytes):
            rule = f"has shape {list(info.shape)}, of which the file has no such bytes"
            raise CheckpointError(f"{self.path}: {shown(name)} {rule}")
        return info._replace(start=begin, num_bytes=num_bytes)

    def _read(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self._bytes, self._place)
        self._place += struct.calcsize(f"<{layout}")
        return values

    def _count(self, count: int, least_bytes: int) -> int:
        """Return a count of things that take so many bytes each, if the rest of the file can hold them."""
        if count * least_bytes > len(self._bytes) - self._place:
            raise CheckpointError(f"{self.path}: says {count} where {len(self._bytes) - self._place} bytes are left")
        return count

    def _text(self) -> str:
        size = self._count(self._read("Q")[0], 1)
        self._place += size
        return self._bytes[self._place - size : self._place].decode()

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._read(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path}: a field has a kind that is not known, {kind}")
        kind, count = self._read("IQ")
        if kind in _SCALARS:
            size = struct.calcsize(f"<{_SCALARS[kind]}")
            return list(self._read(f"{self._count(count, size)}{_SCALARS[kind]}"))
        if kind != _STRING:
            raise CheckpointError(f"{self.path}: a list has a kind that is not known, {kind}")
        return [self._text() for _ in range(self._count(count, 8))]


def card_of(
    path: Path,
    folder: Path,
    check: Callable[[Mapping[str, Any], str], object],
    sampling: Mapping[str, float] | None = None,
) -> Path:
    """Return a model directory for a GGUF file, made in `folder` where it is not there yet.

    A file that changed has another directory. A `chat_template.jinja` beside it goes before the file's own, which not
    all have. `check` is given the configuration and the file's name, and raises
    `CheckpointError` for one that is not served, as this does for what is not sound. `sampling`: how its author draws.
    """
    template = _template_beside(path)
    path = path.resolve()
    status = path.stat()
    identity = f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0{_VERSION}\0{template}"
    stem = re.sub(r"[^\w.-]", "_", path.stem)[:80]
    directory = folder / f"{stem}-{hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()}"
    if (directory / "config.json").exists():
        return directory
    file = GgufFile(path)
    config = file.config()
    check(config, str(path))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".made-") as made:
        begun = Path(made) / "model"
        begun.mkdir()
        _write_tokenizer(path, begun)
        if template:
            (begun / _TEMPLATE).write_text(template, encoding="utf-8")
        (begun / GGUF).symlink_to(path)
        eos = {"eos_token_id": config["eos_token_id"], "bos_token_id": config["bos_token_id"], **(sampling or {})}
        (begun / "generation_config.json").write_text(json.dumps({k: v for k, v in eos.items() if v is not None}))
        (begun / "config.json").write_text(json.dumps(config))
        try:
            os.rename(begun, directory)
        except OSError:  # another process was first
            if not (directory / "config.json").exists():
                shutil.rmtree(directory, ignore_errors=True)
                os.rename(begun, directory)
    return directory


_VERSION = 2  # of what is written
_TEMPLATE = "chat_template.jinja"


def _template_beside(path: Path) -> str:
    """Return the chat template that stands beside a file; nothing: there is none."""
    beside = path.parent / _TEMPLATE
    try:
        found = beside.read_text(encoding="utf-8") if beside.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{beside}: the chat template cannot be read: {error}") from error
    if not found.strip():
        return ""
    logger.info("%s: its chat template is %s", path, beside)
    return found


def _write_tokenizer(path: Path, directory: Path) -> None:
    """Convert the tokenizer and the chat template by `transformers`, which knows each kind."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
        tokenizer.save_pretrained(str(directory))
    except Exception as error:  # whatever a damaged file makes it raise
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path}: the tokenizer cannot be read: {reason[:200]}") from error
