"""What a chunk's bytes depend on beside its tokens: the model, how KV is laid out, how keys were rotated.

A model's weights are told by every byte of every file: headers, sizes and samples would not do, as two fine-tunes of
one model differ in nothing but values, perhaps in few of them. A full hash reads the files once, 64 MB at a time in
several threads. It is remembered by what the file system says of each file (device, inode, size, both times in
nanoseconds), in a small file that only its owner may write; the time of the last status change cannot be set back by a
program, so a file that was changed in place is hashed anew.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

from mneme.cachetier.chunk.syscalls import read_private, write_private
from mneme.cachetier.names import MAX_CHUNK_TOKENS
from mneme.errors import CheckpointError, ConfigError, shown
from mneme.kernels.page_table import KV_SCALE_BYTES

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 4096

_BLOCK_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_DIGEST_BYTES = 32
_MAX_REMEMBERED = 1024  # files
_SETTLED_S = 2.0  # since the last change: a later one has another time, however coarse the file system's clock is
_KV_VERSION = 1  # raised when the same weights and tokens no longer give KV that may be mixed with what is stored
_BOUNDS = {
    "num_layers": MAX_LAYERS,
    "num_kv_heads": MAX_HEADS,
    "head_dim": MAX_HEAD_DIM,
    "chunk_tokens": MAX_CHUNK_TOKENS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """Says how a chunk's payload lies: per layer [K and V, num_kv_heads, tokens, head_dim], one run of bytes.

    Behind the head_dim numbers of int8 lie the bytes of the float32 that they are multiplied with.
    It knows nothing of pages: engines with pages of different sizes read each other's chunks.
    """

    num_layers: int
    num_kv_heads: int  # of one tensor-parallel shard
    head_dim: int
    dtype: str
    chunk_tokens: int = 256  # of a full chunk; chunks begin at its multiples

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype: must be one of {', '.join(DTYPE_BYTES)} (got {shown(self.dtype)})")
        for name, bound in _BOUNDS.items():
            if not 1 <= getattr(self, name) <= bound:
                raise ConfigError(f"{name}: must be from 1 to {bound} (got {shown(getattr(self, name))})")

    def layer_bytes(self, num_tokens: int) -> int:
        scale_bytes = KV_SCALE_BYTES if self.dtype == "int8" else 0
        return 2 * self.num_kv_heads * num_tokens * (self.head_dim * DTYPE_BYTES[self.dtype] + scale_bytes)

    @property
    def chunk_bytes(self) -> int:
        """Count the bytes of a full chunk, but for its header."""
        return self.num_layers * self.layer_bytes(self.chunk_tokens)


@dataclass(frozen=True, kw_only=True)
class ModelFingerprint:
    """All that must be equal for two engines to read each other's KV."""

    weights: str  # hex, see `weights_digest`
    layout: ChunkLayout
    inv_freq: tuple[float, ...]  # radians per position
    attention_factor: float = 1.0
    architecture: str = ""  # whatever else of the configuration changes KV, in one canonical text
    tensor_parallel: tuple[int, int] = (0, 1)  # rank, size

    @cached_property
    def digest(self) -> bytes:
        """32 bytes, the same in every process and on every machine."""
        # The last bits of a frequency are the C library's, so they are left out; float32 tables would round them away.
        fields = {
            "kv_version": _KV_VERSION,
            "weights": self.weights,
            "layout": asdict(self.layout),
            "inv_freq": [f"{f:.12e}" for f in self.inv_freq],
            "attention_factor": f"{self.attention_factor:.12e}",
            "architecture": self.architecture,
            "tensor_parallel": list(self.tensor_parallel),
        }
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return blake2b(text.encode(), digest_size=32, person=b"mneme model").digest()


def weights_digest(paths: Sequence[Path], memory: Path | None = None, num_threads: int = 4) -> str:
    """Hex digest of the files' contents, in the order of their names; where they lie does not matter.

    `memory`: the file that digests are remembered in; None: every call hashes. Raises `CheckpointError` for a file that
    cannot be read, or that changes meanwhile.
    """
    remembered = _remembered(memory)
    total = blake2b(digest_size=_DIGEST_BYTES, person=b"mneme weights")
    found: dict[str, str] = {}
    for path in sorted(paths, key=lambda path: path.name):
        try:
            digest = _file_digest(path, remembered, found, num_threads)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        total.update(path.name.encode() + b"\0" + bytes.fromhex(digest))
    if memory is not None and found.items() - remembered.items():
        _remember(memory, remembered | found)
    return total.hexdigest()


def _file_digest(path: Path, remembered: dict[str, str], found: dict[str, str], num_threads: int) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        before = os.fstat(fd)
        identity = _identity(before)
        digest = remembered.get(identity) or _hash(fd, before.st_size, num_threads)
        if _identity(os.fstat(fd)) != identity:
            raise CheckpointError(f"{path}: changed while it was read")
    finally:
        os.close(fd)
    if time.time() - before.st_ctime > _SETTLED_S:
        found[identity] = digest
    return digest


def _identity(status: os.stat_result) -> str:
    parts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return "-".join(map(str, parts))


def _hash(fd: int, num_bytes: int, num_threads: int) -> str:
    """Hash the blocks' digests, so that blocks can be hashed side by side."""
    total = blake2b(num_bytes.to_bytes(8, "little"), digest_size=_DIGEST_BYTES, person=b"mneme file")
    with ThreadPoolExecutor(num_threads) as threads:
        for digest in threads.map(lambda start: _hash_block(fd, start), range(0, num_bytes, _BLOCK_BYTES)):
            total.update(digest)
    return total.hexdigest()


def _hash_block(fd: int, start: int) -> bytes:
    block, buffer = blake2b(digest_size=_DIGEST_BYTES, person=b"mneme block"), bytearray(_READ_BYTES)
    for offset in range(start, start + _BLOCK_BYTES, _READ_BYTES):
        num_read = os.preadv(fd, [buffer], offset)  # a short read in mid-file is a change, which the caller sees
        block.update(memoryview(buffer)[:num_read])
        if num_read < _READ_BYTES:
            break
    return block.digest()


def _remembered(memory: Path | None) -> dict[str, str]:
    """Return what the file says, if it is ours alone to write and sound; a cache that is neither is empty."""
    try:
        found = None if memory is None else read_private(memory)
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or not all(isinstance(value, str) and _is_digest(value) for value in found.values()):
        return {}
    return found


def _is_digest(text: str) -> bool:
    return len(text) == 2 * _DIGEST_BYTES and all(c in "0123456789abcdef" for c in text)


def _remember(memory: Path, digests: dict[str, str]) -> None:
    """Remember a digest if that is possible; what is not remembered is hashed again."""
    with suppress(OSError):
        write_private(memory, dict(list(digests.items())[-_MAX_REMEMBERED:]))
