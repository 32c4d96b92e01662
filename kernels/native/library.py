"""The compiled CPU path: C++ sources in `cpp/`, built on first use and called through ctypes.

One shared library holds all of `cpp/`. It needs no torch headers, so a build takes seconds; ctypes gives the
interpreter lock back while a function runs. The file is kept in a cache folder under a name that is a hash of the
sources, the compiler and the CPU's features, so neither a new version nor another machine with the same home folder
meets a library that is not its own; a checksum beside it tells whether it is whole, since a truncated library kills
the process that loads it. A folder that others can write to is not used, nor one that cannot be made: then each
process builds for itself. Without a compiler `library()` is None and the torch backend does the work.

    MNEME_NATIVE=0            never build nor use it
    MNEME_CACHE_DIR=<folder>  where built libraries are kept; default: $XDG_CACHE_HOME/mneme or ~/.cache/mneme
    CXX=<compiler>            default: g++, then c++, then clang++
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from mneme.cache_folder import cache_folder, locked

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).resolve().parent / "cpp"
# No -ffast-math: kernels rely on infinities; contraction into fused multiply-adds is what makes products fast.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
_BUILD_TIMEOUT_S = 300
_SCRATCH_PREFIX = "libmneme_build_"
_SCRATCH_KEPT_S = 3600  # longer than any build takes
_LIBRARY_KEPT_S = 30 * 86400  # since it was last loaded


# The C interface as ctypes sees it: types, numbers of dtypes, every function's signature.
POINTER, COUNT, NUMBER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1}  # cpp/common.h: DType
KV_DTYPE_NUMBERS = DTYPE_NUMBERS | {torch.int8: 2}


class LinearWeight(ctypes.Structure):
    """Describes a packed weight to compiled code (cpp/calls.h: MnemeLinear)."""

    _fields_ = (
        *((name, POINTER) for name in ("packed", "bias")),
        *((name, COUNT) for name in ("num_features", "num_steps")),
        *((name, NUMBER) for name in ("dtype", "bits")),
        ("order", POINTER),
    )


_SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "mneme_attend": ((*[POINTER] * 2, COUNT, *[POINTER] * 2, COUNT, *[POINTER] * 3, NUMBER), None),
    "mneme_write_kv": ((POINTER,), COUNT),
    "mneme_kv_deviation": ((POINTER, POINTER), COUNT),
    "mneme_copy_tokens": ((*[POINTER] * 4, *[COUNT] * 7, NUMBER), COUNT),
    "mneme_layers": ((POINTER, *[COUNT] * 2), COUNT),
    "mneme_linear": ((*[POINTER] * 2, *[COUNT] * 2, POINTER, *[NUMBER] * 2), None),
    "mneme_unpack": ((*[POINTER] * 2, NUMBER), None),
    "mneme_rms_norm": ((*[POINTER] * 3, *[COUNT] * 5, REAL, *[NUMBER] * 2), None),
    "mneme_add_rms_norm": ((*[POINTER] * 4, *[COUNT] * 2, REAL, *[NUMBER] * 2), None),
    "mneme_mask_logits": ((*[POINTER] * 2, *[COUNT] * 3, NUMBER), None),
    "mneme_draw_whole": ((*[POINTER] * 3, *[COUNT] * 2, NUMBER), None),
    "mneme_gated": ((*[POINTER] * 2, *[COUNT] * 2, *[NUMBER] * 3), None),
}


@cache
def library() -> ctypes.CDLL | None:
    """Load the compiled kernels; None where they are off or cannot be built, which is logged once."""
    if os.environ.get("MNEME_NATIVE") == "0":
        return None
    try:
        compiler = find_compiler()
        if compiler is None:
            logger.warning("no C++ compiler found: CPU kernels fall back to torch, which is several times slower")
            return None
        return _load(compiler)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        logger.warning("the CPU kernels could not be built, torch is used instead: %s", detail.strip()[-2000:])
        return None


def can_pack(weight: torch.Tensor) -> bool:
    """Tell whether the compiled kernels multiply this weight, as it is or in 8 or 4 bits."""
    return weight.device.type == "cpu" and weight.dtype in DTYPE_NUMBERS and library() is not None


@cache
def native_function(name: str) -> Any:
    """Return a function of the library, typed; only for callers that know that there is one."""
    loaded = library()
    assert loaded is not None, "the caller asked"
    function = getattr(loaded, name)
    function.argtypes, function.restype = _SIGNATURES[name]
    return function


def _load(compiler: tuple[str, ...]) -> ctypes.CDLL:
    path = build(compiler)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        # Whole, but made for another system, or where nothing may be executed: a new one there would be no better.
        logger.warning("the CPU kernels are built for this process alone, the kept ones cannot be loaded: %s", error)
        return ctypes.CDLL(str(build(compiler, folder_of_process())))


def num_threads() -> int:
    """Return how many threads a kernel may use: as many as torch, but one in a forked process.

    There GCC's OpenMP would wait forever for threads of the parent that the fork did not copy.
    """
    return 1 if _is_forked else torch.get_num_threads()


def _mark_forked() -> None:
    global _is_forked
    _is_forked = True


_is_forked = False
os.register_at_fork(after_in_child=_mark_forked)


def find_compiler() -> tuple[str, ...] | None:
    """Return the command that compiles C++, with any arguments that $CXX carries; None if there is none.

    Raises ValueError where $CXX is no command line.
    """
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for name in names:
        try:
            command = tuple(shlex.split(name))
        except ValueError as error:
            raise ValueError(f"CXX: {error} in {name!r}") from None
        if command and shutil.which(command[0]):
            return command
    return None


def build(compiler: tuple[str, ...], folder: Path | None = None, flags: tuple[str, ...] = ()) -> Path:
    """Compile the library if `folder` has no such file, and return its path. By default that is the cache folder or,
    where that cannot be used, a folder of this process.

    Of processes that want it at once, one compiles and the others wait for it. Raises OSError for the `folder`, or if
    another process's build does not end, and subprocess.SubprocessError for the compiler.
    """
    sources = sorted(_FOLDER.glob("*.cpp"))
    command = [*compiler, *_FLAGS, *flags]
    name = f"libmneme_{_digest(sources, command)}.so"
    command += map(str, sources)
    if folder is not None:
        return _build_in(folder, name, command)
    try:
        folder = cache_folder()
        _refuse_open(folder)
        return _build_in(folder, name, command)
    except OSError as error:
        logger.warning("the CPU kernels are built for this process alone, the cache folder cannot be used: %s", error)
        return _build_in(folder_of_process(), name, command)


def _build_in(folder: Path, name: str, command: list[str]) -> Path:
    path = folder / name
    if _is_whole(path):
        with suppress(OSError):  # somebody else's, which may be read only
            os.utime(path)
            os.utime(_checksum_path(path))
        return path
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(folder / "lock"):
        if not _is_whole(path):
            started = time.monotonic()
            _remove_old(folder)
            _compile(command, path)
            logger.info("built the CPU kernels in %.1f s: %s", time.monotonic() - started, path)
    return path


def _compile(command: list[str], path: Path) -> None:
    """Compile to `path`; whatever happens meanwhile, it and its checksum are whole or do not fit each other."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_SCRATCH_PREFIX) as scratch:
        built, checksum = Path(scratch, "library"), Path(scratch, "checksum")
        subprocess.run(
            [*command, "-o", str(built)], check=True, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S
        )
        checksum.write_bytes(checksum_of(built.read_bytes()))
        for file in (built, checksum):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        checksum.replace(_checksum_path(path))
        built.replace(path)


def _is_whole(path: Path) -> bool:
    try:
        return _checksum_path(path).read_bytes() == checksum_of(path.read_bytes())
    except OSError:
        return False


def checksum_of(content: bytes) -> bytes:
    return f"{len(content)} {hashlib.blake2b(content, digest_size=16).hexdigest()}\n".encode()


def _checksum_path(path: Path) -> Path:
    return path.with_suffix(".sum")


def _remove_old(folder: Path) -> None:
    """Remove what killed builds left, and libraries that nobody has loaded for long."""
    now = time.time()
    for path in folder.glob("libmneme_*"):
        with suppress(OSError):  # another process may remove them too
            age_s = now - path.stat().st_mtime
            if path.name.startswith(_SCRATCH_PREFIX) and age_s > _SCRATCH_KEPT_S:
                shutil.rmtree(path)
            elif age_s > _LIBRARY_KEPT_S:
                path.unlink()


def _refuse_open(folder: Path) -> None:
    """Make the folder; raise PermissionError if others could put a library there for us to run."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        owner = f"it belongs to user {found.st_uid} and has mode {found.st_mode & 0o777:o}"
        raise PermissionError(f"others can write to {folder} ({owner})")


@cache
def folder_of_process() -> Path:
    folder = tempfile.mkdtemp(prefix="mneme_")
    atexit.register(partial(shutil.rmtree, folder, ignore_errors=True))
    return Path(folder)


def _digest(sources: list[Path], command: list[str]) -> str:
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    known = hashlib.blake2b(digest_size=12)
    for part in (*(path.read_bytes() for path in (*sources, *sorted(_FOLDER.glob("*.h")))), version.encode()):
        known.update(part)
    known.update(" ".join(command).encode() + cpu_features().encode())
    return known.hexdigest()


def cpu_features() -> str:
    """Return what `-march=native` goes by: the CPU's feature flags, or at least its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("flags", "Features", "model name")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))
