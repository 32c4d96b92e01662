"""Digests of checkpoints: every byte counts, and is hashed once."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mneme.cachetier.chunk import fingerprint as module
from mneme.cachetier.chunk.fingerprint import weights_digest
from mneme.errors import CheckpointError


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(module, "_BLOCK_BYTES", 4 * 1024)
    monkeypatch.setattr(module, "_READ_BYTES", 1024)
    monkeypatch.setattr(module, "_SETTLED_S", -1.0)  # files of this moment are remembered
    found = []
    for number, size in enumerate((0, 1, 4096, 10_000)):
        found.append(tmp_path / f"model-{number}.safetensors")
        found[-1].write_bytes(bytes((i * 7 + number) % 251 for i in range(size)))
    return found


def test_every_byte_counts(paths: list[Path]) -> None:
    digests = {weights_digest(paths)}
    assert weights_digest(paths[::-1], num_threads=1) in digests
    content = bytearray(paths[3].read_bytes())
    for place in (0, 1023, 4096, 9_999):
        content[place] ^= 1
        paths[3].write_bytes(content)
        digests.add(weights_digest(paths))
    digests.add(weights_digest(paths[1:]))
    assert len(digests) == 6


def test_files_are_hashed_once(paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tmp_path / "cache" / "digests"
    expected = weights_digest(paths, memory)
    hashed: list[int] = []
    monkeypatch.setattr(module, "_hash", lambda _fd, num_bytes, _threads: hashed.append(num_bytes) or "00" * 32)
    assert weights_digest(paths, memory) == expected
    assert not hashed
    status = paths[3].stat()
    paths[3].write_bytes(bytes(status.st_size))
    os.utime(paths[3], ns=(status.st_atime_ns, status.st_mtime_ns))  # looks unchanged but for the status change
    assert weights_digest(paths, memory) != expected
    assert hashed == [10_000]


def test_a_file_that_just_changed_is_not_remembered(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SETTLED_S", 2.0)
    memory = tmp_path / "digests"
    weights_digest(paths, memory)
    assert not memory.exists()
    now = time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + 5)
    weights_digest(paths, memory)
    assert memory.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": "zz"}', b'{"a": 3}', b"[" * 100_000])
def test_a_broken_memory_is_empty(paths: list[Path], tmp_path: Path, content: bytes) -> None:
    memory = tmp_path / "digests"
    memory.write_bytes(content)
    assert weights_digest(paths, memory) == weights_digest(paths)


def test_a_memory_that_others_may_write_is_not_believed(paths: list[Path], tmp_path: Path) -> None:
    memory = tmp_path / "digests"
    expected = weights_digest(paths, memory)
    memory.write_text(memory.read_text().replace("0", "1"))
    memory.chmod(0o666)
    assert weights_digest(paths, memory) == expected


def test_a_memory_that_cannot_be_written_costs_only_time(paths: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert weights_digest(paths, tmp_path / "file" / "digests") == weights_digest(paths)


def test_unreadable_and_changing_files_are_refused(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="no-such"):
        weights_digest([*paths, paths[0].with_name("no-such")])

    def change(fd: int, _num_bytes: int, _threads: int) -> str:
        with open(paths[0], "ab") as file:
            file.write(b"x")
        return "00" * 32

    monkeypatch.setattr(module, "_hash", change)
    with pytest.raises(CheckpointError, match="changed"):
        weights_digest(paths[:1])
