"""Times the compiled kernels and torch's on this machine's CPU, once, and keeps the seconds in the cache folder.

`kernels/native/choice.py` says what follows from them. All is timed on one thread, whose own time neighbours on the
machine change little; with several it would depend on who got how much of the work. Each arm takes its turn three
times, and its fastest counts. Torch's products include unpacking the weight, its attention what goes before it and
behind it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from mneme.cache_folder import cache_folder, locked
from mneme.cachetier.chunk.syscalls import read_private, write_private
from mneme.kernels.attention import PageRef, QueryRows, RopeTable, attend, build_plan
from mneme.kernels.linear import make_linear
from mneme.kernels.native.choice import Choice, HalfDtype, Timing, Work, choose
from mneme.kernels.native.library import cpu_features, library

logger = logging.getLogger(__name__)

_ROWS = (1, 16, 64, 256, 512)
_NUM_WEIGHTS, _SIZE = 4, 1024  # square: 8 MB in bfloat16, more than a core's own caches
_PROMPT_ROWS = (64, 256, 512)  # of one prompt, behind so many tokens:
_PAST, _PAGE_SIZE = 1024, 32
_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 8, 4, 64
_NUM_TURNS = 3
_WORKS = get_args(Work)
_BUDGET_S = 5.0  # by the clock on the wall: nothing is begun after it; on an idle core with AVX-512 all takes about one
_FORMAT = "mneme kernel timings 1"
_DTYPES: dict[HalfDtype, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@cache
def machine_choice() -> Choice:
    """Return what this machine's timings say; they are measured where an earlier start has left none."""
    choice = choose(_kept_timings())
    logger.info("kernels of this CPU: %s", choice)
    return choice


def _kept_timings() -> list[Timing]:
    """Read them or measure them; of processes that start at once one measures, and the others read."""
    loaded = library()
    about = (cpu_features(), None if loaded is None else Path(loaded._name).stem, torch.__version__)
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
        if not content["timings"]:
            raise ValueError("timings: there are none")
        return [_timing(each) for each in content["timings"]]
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        logger.warning("kernels are timed anew, %s cannot be used: %s", path, error)
        return None


def _timing(entry: Any) -> Timing:
    work, dtype, rows, *seconds = entry
    timing = Timing(work, dtype, int(rows), *map(float, seconds))
    if work not in _WORKS or dtype not in _DTYPES or not all(0 < each < 1e6 for each in timing[2:]):
        raise ValueError(f"timing: {entry}")
    return timing


def measured_timings(
    rows: Sequence[int] = _ROWS,
    prompt_rows: Sequence[int] = _PROMPT_ROWS,
    budget_s: float = _BUDGET_S,
    clock: Callable[[], float] = time.thread_time,
    wall: Callable[[], float] = time.monotonic,
) -> list[Timing]:
    """Time products and attention of these sizes, the small ones first, until the budget of `wall` is spent."""
    until_s, found = wall() + budget_s, list[Timing]()
    with torch.inference_mode(), _one_thread():
        weights = torch.randn(_NUM_WEIGHTS, _SIZE, _SIZE, generator=torch.Generator().manual_seed(0)) * _SIZE**-0.5
        for num_rows in rows:
            for name, dtype in _DTYPES.items():
                if found and wall() > until_s:
                    return found
                arms = [_multiply(weights.to(dtype), num_rows, torch_rows) for torch_rows in (None, 1)]
                found.append(Timing("product", name, num_rows, *_fastest_s(arms, clock)))
        for num_rows in prompt_rows:
            for name, dtype in _DTYPES.items():
                if wall() > until_s:
                    return found
                arms = [_attend(num_rows, dtype, least_rows) for least_rows in (None, 1)]
                found.append(Timing("attention", name, num_rows, *_fastest_s(arms, clock)))
    return found


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _multiply(weights: Tensor, num_rows: int, torch_rows: int | None) -> Callable[[], object]:
    linears = [make_linear(weight, None, torch_rows) for weight in weights]
    x = torch.ones(num_rows, _SIZE, dtype=weights.dtype)
    return lambda: [linear(x) for linear in linears]


def _attend(num_rows: int, dtype: torch.dtype, prompt_rows: int | None) -> Callable[[], object]:
    """Attention of a prompt's last rows, in one layer of a pool that holds it alone."""
    num_pages = (_PAST + num_rows) // _PAGE_SIZE
    shape = (_NUM_KV_HEADS, num_pages, _PAGE_SIZE, _HEAD_DIM)
    k_pages, v_pages = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    q = torch.ones(num_rows, _NUM_HEADS, _HEAD_DIM, dtype=dtype)
    rope = RopeTable.from_theta(10_000.0, _HEAD_DIM, _PAST + num_rows)
    slot_position = torch.arange(num_pages * _PAGE_SIZE, dtype=torch.int32)
    positions = range(_PAST, _PAST + num_rows)
    rows = QueryRows([0] * num_rows, positions)
    plan = build_plan(
        [[PageRef(page) for page in range(num_pages)]], rows,
        page_size=_PAGE_SIZE, num_q_heads=_NUM_HEADS, num_kv_heads=_NUM_KV_HEADS, head_dim=_HEAD_DIM,
    )  # fmt: skip
    scale = _HEAD_DIM**-0.5
    return lambda: attend(q, k_pages, v_pages, slot_position, rope, plan, softmax_scale=scale, prompt_rows=prompt_rows)


def _fastest_s(arms: Sequence[Callable[[], object]], clock: Callable[[], float]) -> list[float]:
    seconds = [float("inf")] * len(arms)
    for _ in range(_NUM_TURNS):
        for index, arm in enumerate(arms):
            started_s = clock()
            arm()
            seconds[index] = min(seconds[index], max(clock() - started_s, 1e-9))
    return seconds
