"""The compiled CPU path: C++ sources beside this file, built on first use and called through ctypes.

One shared library holds all `native_*.cpp` files. It needs no torch headers, so a build takes seconds; ctypes gives the
interpreter lock back while a function runs. The file is kept in a cache folder under a name that is a hash of the
sources, the compiler and the CPU's features, so neither a new version nor another machine with the same home folder
meets a library that is not its own. Without a compiler `library()` is None and the torch backend does the work.

    MNEME_NATIVE=0            never build nor use it
    MNEME_CACHE_DIR=<folder>  where built libraries are kept; default: $XDG_CACHE_HOME/mneme or ~/.cache/mneme
    CXX=<compiler>            default: g++, then c++, then clang++
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).resolve().parent
# No -ffast-math: kernels rely on infinities; contraction into fused multiply-adds is what makes products fast.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
_BUILD_TIMEOUT_S = 300


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they are switched off or cannot be built; the reason is logged once."""
    if os.environ.get("MNEME_NATIVE") == "0":
        return None
    compiler = find_compiler()
    if compiler is None:
        log.warning("no C++ compiler found: CPU kernels fall back to torch, which is several times slower")
        return None
    try:
        return ctypes.CDLL(str(build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        log.warning("the CPU kernels could not be built, torch is used instead: %s", detail.strip()[-2000:])
        return None


def num_threads() -> int:
    """How many threads a kernel may use: as many as torch, but one in a forked process.

    There GCC's OpenMP would wait forever for threads of the parent that the fork did not copy.
    """
    return 1 if _is_forked else torch.get_num_threads()


def _mark_forked() -> None:
    global _is_forked
    _is_forked = True


_is_forked = False
os.register_at_fork(after_in_child=_mark_forked)


def find_compiler() -> tuple[str, ...] | None:
    """The command that compiles C++, with any arguments that $CXX carries; None if there is none."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for name in names:
        command = tuple(shlex.split(name))
        if command and shutil.which(command[0]):
            return command
    return None


def build(compiler: tuple[str, ...], folder: Path | None = None, flags: tuple[str, ...] = ()) -> Path:
    """The library's path; compiles it if the cache `folder` has no such file.

    Of processes that want it at once, one compiles and the others wait for it.
    """
    sources = sorted(_FOLDER.glob("native_*.cpp"))
    folder = folder or cache_folder()
    command = [*compiler, *_FLAGS, *flags]
    path = folder / f"libmneme_{_digest(sources, command)}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with (folder / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path
        built = Path(scratch) / path.name
        subprocess.run(
            [*command, *map(str, sources), "-o", str(built)],
            check=True, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S,
        )  # fmt: skip
        built.replace(path)
    log.info("built the CPU kernels in %.1f s: %s", time.monotonic() - started, path)
    return path


def cache_folder() -> Path:
    """Where built libraries are kept."""
    if chosen := os.environ.get("MNEME_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mneme"


def _digest(sources: list[Path], command: list[str]) -> str:
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    known = hashlib.blake2b(digest_size=12)
    for part in (*(path.read_bytes() for path in (*sources, *sorted(_FOLDER.glob("native_*.h")))), version.encode()):
        known.update(part)
    known.update(" ".join(command).encode() + cpu_features().encode())
    return known.hexdigest()


def cpu_features() -> str:
    """What `-march=native` goes by: the CPU's feature flags, or at least its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("flags", "Features", "model name")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))
