"""Times the compiled kernels and torch's on this machine's CPU, once, and keeps the seconds in the cache folder.

`kernels/native/choice.py` says what follows from them. Each arm takes its turn three times, and its fastest counts, in
time of this thread, which neighbours on the machine change least. Torch's products include unpacking the weight.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from mneme.cache_folder import cache_folder, locked
from mneme.cachetier.chunk.syscalls import read_private, write_private
from mneme.kernels.linear import Linear, make_linear
from mneme.kernels.native.choice import Choice, HalfDtype, Timing, Work, choose
from mneme.kernels.native.library import cpu_features, library

logger = logging.getLogger(__name__)

_ROWS = (1, 16, 64, 256, 512)
_NUM_WEIGHTS, _SIZE = 4, 1024  # square: 8 MB in bfloat16, more than a core's own caches
_NUM_TURNS = 3
_WORKS = get_args(Work)
_BUDGET_S = 3.0  # nothing is begun after it; on a core with AVX-512 all takes about one
_FORMAT = "mneme kernel timings 1"
_DTYPES: dict[HalfDtype, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def machine_choice() -> Choice:
    """Return what this machine's timings say; they are measured where an earlier start has left none."""
    return _choice_of(torch.get_num_threads())


@cache
def _choice_of(num_threads: int) -> Choice:
    """`num_threads`: torch's, for which the timings are."""
    timings = _kept_timings(num_threads)
    choice = choose(timings)
    logger.info("kernels of this CPU: %s", choice)
    return choice


def _kept_timings(num_threads: int) -> list[Timing]:
    """Read them or measure them; of processes that start at once one measures, and the others read."""
    loaded = library()
    about = (cpu_features(), None if loaded is None else Path(loaded._name).stem, torch.__version__, num_threads)
    machine = blake2b(f"{about} {os.cpu_count()}".encode(), digest_size=12).hexdigest()
    with contextlib.ExitStack() as held:
        try:
            folder = cache_folder()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            held.enter_context(locked(folder / "timings.lock"))
        except OSError as error:
            logger.warning("timings of kernels are not kept: %s", error)
            return measured_timings()
        path = folder / f"timings-{machine}.json"
        found = _read(path)
        if found is None:
            found = measured_timings()
            with contextlib.suppress(OSError):  # what is not kept is measured again
                write_private(path, {"format": _FORMAT, "timings": found})
        return found


def _read(path: Path) -> list[Timing] | None:
    try:
        content = read_private(path)
        if content is None:
            return None
        if content["format"] != _FORMAT:
            raise ValueError(f"format: must be {_FORMAT!r}")
        return [_timing(each) for each in content["timings"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("kernels are timed anew, %s cannot be used: %s", path, error)
        return None


def _timing(entry: Any) -> Timing:
    work, dtype, rows, *seconds = entry
    timing = Timing(work, dtype, int(rows), *map(float, seconds))
    if work not in _WORKS or dtype not in _DTYPES or not all(0 < each < 1e6 for each in timing[2:]):
        raise ValueError(f"timing: {entry}")
    return timing


def measured_timings(
    rows: Sequence[int] = _ROWS, budget_s: float = _BUDGET_S, clock: Callable[[], float] = time.thread_time
) -> list[Timing]:
    """Time products of all these sizes, the small ones first; `clock` times each, and what is left of the budget."""
    until_s, found = clock() + budget_s, list[Timing]()
    with torch.inference_mode():
        weights = torch.randn(_NUM_WEIGHTS, _SIZE, _SIZE, generator=torch.Generator().manual_seed(0)) * _SIZE**-0.5
        for num_rows in rows:
            for name, dtype in _DTYPES.items():
                if found and clock() > until_s:
                    return found
                arms = [[make_linear(weight.to(dtype), None, each) for weight in weights] for each in (None, 1)]
                x = torch.ones(num_rows, _SIZE, dtype=dtype)
                found.append(Timing("product", name, num_rows, *_fastest_s(arms, x, clock)))
    return found


def _fastest_s(arms: Sequence[Sequence[Linear]], x: Tensor, clock: Callable[[], float]) -> list[float]:
    seconds = [float("inf")] * len(arms)
    for _ in range(_NUM_TURNS):
        for index, linears in enumerate(arms):
            started_s = clock()
            for linear in linears:
                linear(x)
            seconds[index] = min(seconds[index], max(clock() - started_s, 1e-9))
    return seconds
