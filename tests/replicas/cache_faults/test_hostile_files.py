"""Files that are not what their names say: each is a miss, and nothing of it is unpacked, followed or waited for."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mneme.cachetier.chunk.file import write_chunk
from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.chunk.header import Chunk, LayerOffsets, checksum, encode_header
from mneme.cachetier.node.folder import name_of
from mneme.replicas.model.decoder import Decoder
from tests.cachetier.chunk.test_chunk_file import BIG, FIELDS, with_field
from tests.replicas.cache_faults.saved_turn import FILES, NextTurn, chunk_in
from tests.replicas.tiered_engine import fingerprint_of


@pytest.mark.parametrize("field", FIELDS)
def test_a_header_says_something_else(next_turn: NextTurn, field: str) -> None:
    """A newer version, lengths beyond the file, absurd shapes; signed, as a hostile writer would."""
    for value in (0, 2, BIG.get(field, 2**16 - 1)):
        next_turn.saved.put_into(next_turn.folder)
        path = next_turn.paths[1]
        chunk = chunk_in(path)
        found = next_turn.ask(when_open=lambda: with_field(path, chunk, field, value))  # noqa: B023
        whole = (next_turn.saved.num_history, len(next_turn.saved.turn) - 1)  # the latter by the answer before
        if found.cached["turn"] in whole:  # the value that it had
            assert found.counters["misses"] == 0
        else:
            assert found.counters["misses"] > 0
            assert (found.counters["disk_miss_other_version"] > 0) == (field == "version")


def bomb(path: Path) -> None:
    """Arrow may compress bodies; its own reader would unpack this to 200 MB."""
    chunk = chunk_in(path)
    header = encode_header(chunk.header, LayerOffsets(4000, 10**9, 4 * 10**9))
    schema = pa.schema([pa.field("kv", pa.uint8())], metadata={b"mneme.chunk": header})
    batch = pa.record_batch([pa.array(np.zeros(200_000_000, np.uint8))], schema=schema)
    with pa.ipc.new_file(str(path), schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)


def link(path: Path) -> None:
    other = path.with_suffix(".other")
    path.rename(other)
    path.symlink_to(other)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def folder_there(path: Path) -> None:
    path.unlink()
    path.mkdir()


def others(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give a file away")
    os.chown(path, 12345, 12345)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "compressed bomb": bomb,
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "noise": lambda path: path.write_bytes(random.Random(5).randbytes(path.stat().st_size)),
    "huge": lambda path: os.truncate(path, 1 << 40),
    "link": link,
    "pipe": pipe,
    "folder": folder_there,
    "of another user": others,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_something_hostile_lies_under_the_right_name(next_turn: NextTurn, name: str) -> None:
    """It comes while the tier has the folder; then it is there when the tier starts."""
    path = next_turn.paths[1]
    found = next_turn.ask_and_miss("misses", when_open=lambda: HOSTILE[name](path))
    assert found.cached["turn"] <= 64
    next_turn.ask()


def foreign(path: Path, other: ModelFingerprint) -> Chunk:
    """Another model's chunk that says it has this one's key; nothing of it is right but its form."""
    chunk = chunk_in(path)
    layers = tuple(np.random.default_rng(3).integers(0, 256, len(layer), dtype=np.uint8) for layer in chunk.layers)
    ours = replace(chunk.header, fingerprint=other.digest)
    return Chunk(replace(ours, checksums=tuple(checksum(layer.data) for layer in layers)), layers)


@pytest.mark.parametrize("has_own_name", [True, False])
@pytest.mark.parametrize("difference", ["weights", "rope"])
def test_a_chunk_of_another_model_lies_under_the_right_name(
    decoder: Decoder, next_turn: NextTurn, difference: str, has_own_name: bool
) -> None:
    mine = fingerprint_of(decoder)
    change = {"weights": "01"} if difference == "weights" else {"inv_freq": tuple(f * 1.01 for f in mine.inv_freq)}
    path = next_turn.paths[1]
    chunk = foreign(path, replace(mine, **change))  # type: ignore[arg-type]
    num_bytes = path.stat().st_size
    path.unlink()
    target = path.with_name(str(name_of(chunk.header, num_bytes))) if has_own_name else path
    write_chunk(FILES, str(path.with_suffix(".tmp")), str(target), chunk)
    next_turn.ask_and_miss("disk_miss_other_model" if has_own_name else "disk_miss_other_key")
