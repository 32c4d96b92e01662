"""How the compiled kernels are built, kept and done without."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mneme.kernels.native import library as native_library
from mneme.kernels.native.library import build, find_compiler, library

Fresh = Callable[[], ctypes.CDLL | None]
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
# Attention and a KV write on the default path, and which backend that was.
PROGRAM = """
import logging; logging.basicConfig(format="LOGGED %(message)s")
import torch
from mneme.kernels.attention import PageRef, QueryRows, RopeTable, attend, build_plan, new_slot_position, write_kv
from mneme.kernels.native.library import library
pool, slot_position, rope = torch.zeros(2, 1, 2, 4, 16), new_slot_position(8), RopeTable.from_theta(100.0, 16, 8)
k = torch.arange(32.0).view(2, 1, 16); slots = torch.tensor([4, 5]); slot_position[slots] = torch.tensor([0, 1]).int()
write_kv(k, k, slots, torch.tensor([0, 1]), *pool, rope)
sizes = {"page_size": 4, "num_q_heads": 1, "num_kv_heads": 1, "head_dim": 16}
plan = build_plan([[PageRef(1)]], QueryRows([0], [0]), **sizes)
for _ in range(2):
    out, lse = attend(k[:1], *pool, slot_position, rope, plan, softmax_scale=1.0)
    assert torch.equal(out, k[:1]), out
print("native" if library() else "torch")
"""


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one small source in place of the kernels, which take ten seconds."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "native_small.h").write_text("constexpr int kAnswer = 42;\n")
    (folder / "native_small.cpp").write_text('#include "native_small.h"\nextern "C" int answer() { return kAnswer; }\n')
    monkeypatch.setattr(native_library, "_FOLDER", folder)
    return folder


def compiler() -> tuple[str, ...]:
    found = find_compiler()
    assert found is not None
    return found


def answer(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


@needs_compiler
def test_a_library_is_built_once_for_each_version_of_the_sources_and_cpu(
    small_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = build(compiler(), cache)
    assert answer(first) == 42
    inode = first.stat().st_ino
    assert build(compiler(), cache) == first
    assert first.stat().st_ino == inode
    (small_sources / "native_small.h").write_text("constexpr int kAnswer = 43;\n")
    second = build(compiler(), cache)
    assert second != first
    assert (answer(first), answer(second)) == (42, 43)
    assert build(compiler(), cache, flags=("-O0",)) not in (first, second)
    suffixes = sorted(path.suffix for path in cache.iterdir())
    assert suffixes == ["", ".so", ".so", ".so", ".sum", ".sum", ".sum"]  # the lock, no leftovers
    monkeypatch.setattr(native_library, "cpu_features", lambda: "flags: something newer")
    assert build(compiler(), cache) not in (first, second)


@needs_compiler
def test_builds_at_once_end_in_one_library(small_sources: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: build(compiler(), tmp_path / "cache"), range(4)))
    assert len(set(paths)) == 1
    assert answer(paths[0]) == 42


@pytest.fixture
def fresh_library(small_sources: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fresh]:
    """`library` as a new process would meet it."""
    monkeypatch.delenv("MNEME_NATIVE", raising=False)

    def fresh() -> ctypes.CDLL | None:
        library.cache_clear()
        return library()

    native_library.folder_of_process.cache_clear()
    yield fresh
    library.cache_clear()
    native_library.folder_of_process.cache_clear()


def folder_of(loaded: ctypes.CDLL | None) -> Path:
    """Where a library lies that does its work."""
    assert loaded is not None
    assert loaded.answer() == 42
    return Path(loaded._name).parent


@needs_compiler
def test_a_failing_compiler_is_one_warning_and_no_library(
    small_sources: Path,
    fresh_library: Fresh,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (small_sources / "native_small.cpp").write_text("this is not C++\n")
    monkeypatch.setenv("MNEME_CACHE_DIR", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):
        assert [fresh_library(), library()] == [None, None]
    [record] = caplog.records
    assert "torch is used instead" in record.message
    assert "native_small.cpp" in record.message
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


@needs_compiler
@pytest.mark.parametrize("keep", ["nothing", "all but the end"])
def test_a_damaged_library_is_built_again(small_sources: Path, tmp_path: Path, keep: str) -> None:
    path = build(compiler(), tmp_path)
    whole = path.read_bytes()
    path.write_bytes(b"" if keep == "nothing" else whole[:-100])
    assert build(compiler(), tmp_path) == path
    assert answer(path) == 42


@needs_compiler
def test_a_whole_library_that_cannot_be_loaded_is_built_for_the_process(
    fresh_library: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MNEME_CACHE_DIR", str(tmp_path))
    path = build(compiler())
    path.write_bytes(b"of another system")
    path.with_suffix(".sum").write_bytes(native_library.checksum_of(path.read_bytes()))
    assert folder_of(fresh_library()) != tmp_path
    assert "the kept ones cannot be loaded" in caplog.text


@needs_compiler
@pytest.mark.parametrize("obstacle", ["a file in its place", "no home", "open to all", "open to the group"])
def test_a_cache_that_cannot_be_used_is_a_warning(
    fresh_library: Fresh,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    obstacle: str,
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("MNEME_CACHE_DIR", str(cache))
    if obstacle == "no home":
        for name in ("MNEME_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", raise_no_home)
    elif obstacle == "a file in its place":
        cache.write_text("")
    else:
        build(compiler())
        cache.chmod(0o777 if obstacle == "open to all" else 0o770)
    folder = folder_of(fresh_library())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent == Path(tempfile.gettempdir())
    assert "the cache folder cannot be used" in caplog.text


def raise_no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@needs_compiler
def test_another_users_build_is_not_waited_for_forever(
    fresh_library: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mneme.cache_folder._LOCK_TIMEOUT_S", 0.2)
    monkeypatch.setenv("MNEME_CACHE_DIR", str(tmp_path))
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert folder_of(fresh_library()).parent == Path(tempfile.gettempdir())  # for this process alone
    assert f"another process has held {tmp_path / 'lock'} for 0 s" in caplog.text
    assert folder_of(fresh_library()) == tmp_path


@needs_compiler
def test_a_build_removes_what_is_old(small_sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    used = build(compiler(), cache, flags=("-O0",))
    unused = build(compiler(), cache, flags=("-O1",))
    day_s, now = 86400, time.time()
    killed, running = cache / "libmneme_build_killed", cache / "libmneme_build_running"
    for folder, age_s in ((killed, 2 * 3600), (running, 600)):
        folder.mkdir()
        (folder / "library").write_text("half")
        os.utime(folder, (now - age_s, now - age_s))
    (cache / "mine").write_text("")
    for path in (used, unused, used.with_suffix(".sum"), unused.with_suffix(".sum"), cache / "mine"):
        os.utime(path, (now - 40 * day_s, now - 40 * day_s))
    assert build(compiler(), cache, flags=("-O0",)) == used  # counts as use
    new = build(compiler(), cache)
    kept = {path.with_suffix(suffix).name for path in (used, new) for suffix in (".so", ".sum")}
    assert {path.name for path in cache.iterdir()} == kept | {"lock", "mine", running.name}


# Two threads before the fork; the child has to end on its own.
FORKING_PROGRAM = """
import os, signal, torch
torch.set_num_threads(2)
from mneme.kernels.attention import PageRef, QueryRows, attend, build_plan
from mneme.kernels.native.library import num_threads
pages, slot_position, q = torch.randn(2, 4, 64, 16, 64), torch.arange(1024).int(), torch.randn(8, 8, 64)
sizes = {"page_size": 16, "num_q_heads": 8, "num_kv_heads": 4, "head_dim": 64}
plan = build_plan([[PageRef(page) for page in range(64)]] * 8, QueryRows(range(8), [1000] * 8), **sizes)
def run():
    return attend(q, *pages, slot_position, None, plan, softmax_scale=0.1, backend="native")[0]
wanted, in_parent = run(), num_threads()
child = os.fork()
if not child:
    signal.alarm(20)
    os._exit(0 if torch.equal(run(), wanted) else 3)
print(in_parent, os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(library() is None, reason="the compiled kernels are off or cannot be built")
def test_a_forked_process_computes_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING_PROGRAM], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.split() == ["2", "0"], done.stderr


def run_program(**environment: str) -> tuple[str, list[str]]:
    """The backend that a fresh process used, and what it logged."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True, text=True, timeout=200, check=False, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), [line for line in done.stderr.splitlines() if line.startswith("LOGGED")]


def test_without_a_compiler_torch_does_the_work() -> None:
    backend, logged = run_program(CXX="/nonexistent/c++", MNEME_NATIVE="1")
    assert backend == "torch"
    assert logged == ["LOGGED no C++ compiler found: CPU kernels fall back to torch, which is several times slower"]


def test_switched_off_torch_does_the_work_silently() -> None:
    assert run_program(MNEME_NATIVE="0") == ("torch", [])


@pytest.mark.skipif(library() is None, reason="the compiled kernels are off or cannot be built")
def test_with_a_compiler_the_compiled_kernels_do_the_work() -> None:
    assert run_program() == ("native", [])
