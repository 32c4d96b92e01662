"""`mneme cache verify|stats` on folders that a real tier wrote, sound, damaged and hostile."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mneme.cachetier.chunk.header import Chunk
from mneme.cachetier.chunk.keys import prefix_lineage, session_lineage
from mneme.cachetier.config import DiskTierConfig
from mneme.cachetier.names import tenant_id
from mneme.cachetier.node import folder, offline
from mneme.cachetier.node.disk import DiskTier, Put
from mneme.cachetier.policy.eviction import LruPolicy
from mneme.cluster.cli.main import main
from tests.cachetier.chunks import CHUNK_TOKENS, FINGERPRINT, chain_of, chunk_files, chunk_of

OTHER = prefix_lineage(FINGERPRINT, "other")
OF_SESSION = session_lineage(FINGERPRINT, "tenant", "a")


@pytest.fixture(autouse=True)
def few_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "NUM_FOLDERS", 4)


def open_tier(folder: Path) -> DiskTier:
    return DiskTier(DiskTierConfig(folder=str(folder), capacity_bytes=1 << 22), LruPolicy())


def put(tier: DiskTier, chunks: list[Chunk]) -> list[Chunk]:
    assert {tier.put(chunk) for chunk in chunks} == {Put.WRITTEN}
    return chunks


def filled(folder: Path) -> list[Chunk]:
    """Three chunks of a prefix, one of another tenant, one of a session; nobody holds the lock."""
    tier = open_tier(folder)
    chunks = put(tier, chain_of(list(range(20))))
    chunks += put(tier, [chunk_of([7, 8], lineage=OTHER)])
    chunks += put(tier, [chunk_of(list(range(CHUNK_TOKENS)), lineage=OF_SESSION)])
    tier.close()
    return chunks


def cache(what: str, folder: Path, *arguments: str) -> int:
    return main(["cache", what, "--folder", str(folder), *arguments])


def read_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def run(capsys: pytest.CaptureFixture[str], what: str, folder: Path, *arguments: str, status: int = 0) -> Any:
    capsys.readouterr()
    assert cache(what, folder, *arguments, "--json") == status
    return read_json(capsys)


def path_of(folder: Path, chunk: Chunk) -> Path:
    return next(path for path in chunk_files(folder) if path.name.startswith(chunk.header.key.hex()))


def test_everything_is_read_beside_a_running_tier_and_nothing_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = open_tier(tmp_path)
    put(tier, chain_of(list(range(20))))
    before, times = tier.stats(), [path.stat().st_mtime_ns for path in chunk_files(tmp_path)]
    assert run(capsys, "verify", tmp_path)["chunks"] == 3
    assert run(capsys, "stats", tmp_path)["chunks"] == 3
    assert tier.stats() == before
    assert [path.stat().st_mtime_ns for path in chunk_files(tmp_path)] == times
    os.truncate(path_of(tmp_path, put(tier, [chunk_of([99])])[0]), 100)
    assert cache("verify", tmp_path, "--delete") == 2
    assert "is locked: a running cluster uses it" in capsys.readouterr().err
    assert len(chunk_files(tmp_path)) == 4
    tier.close()


def test_chunks_are_summed_up_by_lineage_and_tenant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path)
    found, sizes = run(capsys, "stats", tmp_path), [path.stat().st_size for path in chunk_files(tmp_path)]
    assert (found["chunks"], found["tokens"], found["bytes"]) == (5, 30, sum(sizes))
    assert {name: sums["chunks"] for name, sums in found["lineages"].items()} == {"prefix": 4, "session": 1}
    tenants = {name: sums["chunks"] for name, sums in found["tenants"].items()}
    assert tenants == {tenant_id("tenant").hex(): 4, tenant_id("other").hex(): 1}


def test_a_file_that_cannot_be_removed_is_not_counted_as_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for chunk in filled(tmp_path):
        os.truncate(path_of(tmp_path, chunk), 100)

    def refuse(path: str, **_: object) -> None:
        raise PermissionError(13, "no", path)

    monkeypatch.setattr(os, "unlink", refuse)
    found = run(capsys, "verify", tmp_path, "--delete", status=1)
    assert (found["bad"], found["removed"], len(chunk_files(tmp_path))) == (5, 0, 5)


def test_a_link_in_a_folders_place_is_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path)
    inside, moved = next(path.parent for path in chunk_files(tmp_path)), tmp_path / "moved"
    inside.rename(moved)
    inside.symlink_to(moved)
    num_moved = len(chunk_files(moved))
    assert run(capsys, "verify", tmp_path, "--delete")["chunks"] == 5 - num_moved
    assert len(chunk_files(moved)) == num_moved
    own = inside.parent
    own.chmod(0o777)  # others may write to it
    assert cache("stats", tmp_path) == 2
    assert "folder: " in capsys.readouterr().err


@pytest.mark.parametrize(("layer", "buffer_bytes"), [(0, 1), (1, 64), (2, 4 << 20)])
def test_a_flipped_bit_in_any_layer_is_found(
    tmp_path: Path, layer: int, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offline, "_BUFFER_BYTES", buffer_bytes)
    chunk = filled(tmp_path)[1]
    path = path_of(tmp_path, chunk)
    content = bytearray(path.read_bytes())
    payload = chunk.layers[layer].tobytes()
    content[content.index(payload) + len(payload) - 1] ^= 0x10
    path.write_bytes(content)
    found = run(capsys, "verify", tmp_path, status=1)
    assert (found["chunks"], found["bad"], found["bad_by_miss"]) == (4, 1, {"bad_checksum": 1})
    assert found["bad_files"] == [{"file": str(path), "miss": "bad_checksum"}]
    assert path.exists()
    assert run(capsys, "verify", tmp_path, "--delete", status=1)["removed"] == 1
    assert not path.exists()
    assert run(capsys, "verify", tmp_path, "--delete")["chunks"] == 4


def test_every_kind_of_damage_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chunks = filled(tmp_path)
    short, headless, renamed, linked, sound = (path_of(tmp_path, chunk) for chunk in chunks)
    os.truncate(short, 100)
    headless.write_bytes(bytes(headless.stat().st_size))
    swapped = renamed.with_name(renamed.name.replace(tenant_id("tenant").hex(), tenant_id("other").hex()))
    renamed.rename(swapped)
    target = tmp_path / "target"
    linked.rename(target)
    linked.symlink_to(target)
    found = run(capsys, "verify", tmp_path, "--delete", status=1)
    assert {entry["file"]: entry["miss"] for entry in found["bad_files"]} == {
        str(short): "short",
        str(headless): "no_header",
        str(swapped): "other_key",
        str(linked): "not_ours",
    }
    assert (found["bad"], found["removed"], found["chunks"]) == (4, 3, 1)
    assert linked.is_symlink()
    assert target.exists()
    assert sound.exists()
    assert not any(path.exists() for path in (short, headless, swapped))


def hostile(folder: Path) -> list[Path]:
    """What no tier made: none of it may be opened, followed or removed."""
    inside = next(path.parent for path in chunk_files(folder))
    outside = folder / "outside"
    outside.mkdir()
    elsewhere = outside / chunk_files(folder)[0].name
    elsewhere.write_bytes(chunk_files(folder)[0].read_bytes())
    fifo = inside / f"{inside.name}{'0' * 30}-{'0' * 32}-{'0' * 16}-{'0' * 16}-p1-10.kv"
    os.mkfifo(fifo)
    directory = inside / f"{inside.name}{'1' * 30}-{'0' * 32}-{'0' * 16}-{'0' * 16}-p1-10.kv"
    directory.mkdir()
    named = [inside / "\x1b[2Jx", inside / "-rf", inside / ("y" * 255)]
    for path in named:
        path.write_text("not yours")
    other = inside.parent / "sessions"
    other.mkdir()
    (other / "a.log").write_text("another room")
    return [elsewhere, fifo, directory, *named, other / "a.log"]


def test_nothing_of_a_hostile_folder_is_believed_or_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path)
    strangers = hostile(tmp_path)
    found = run(capsys, "stats", tmp_path)
    assert (found["chunks"], found["other_files"]) == (5, {"unknown": 3, "not_ours": 2})
    assert run(capsys, "verify", tmp_path, "--delete", status=1)["bad_by_miss"] == {"not_ours": 2}
    assert cache("stats", tmp_path) == 0
    assert cache("verify", tmp_path) == 1
    assert "\x1b" not in capsys.readouterr().out
    assert all(path.exists() for path in strangers)
