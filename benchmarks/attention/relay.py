"""RelayAttention Fig. 1 and 5: latency, and the speed-up over sequence-first beside Eq. 10.

Two baselines stand for "sequence-first": `never` reads the very pages that `auto` reads, and finds what fits in the
last cache there; `unshared` reads pages of which every sequence has copies of its own, which is what Eq. 8 counts
(elements between memory and chip), so it is the one that Eq. 10 is held against. The compute roof is the time of the
shared part's products at the measured matrix rate, as a speed-up over reading all bytes at the measured copy rate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from attention.arms import contiguous, ours
from attention.bench import DTYPES, Bench, NotRun, least, ran
from attention.optional_arms import contiguous_by_head, flashinfer_cascade, flashinfer_decode
from attention.scenes import Heads, Scene, prefix_scene, unshared
from harness import Check, PartResult, at_least

_DTYPE = "bfloat16"
_GQA, _MHA = Heads(32, 8, 128), Heads(32, 32, 128)
_SHARE_OF_BOUND = 0.9
# A launch has a fixed cost, some microseconds, which no equation counts: it is a figure of its own (gpu/attention.py),
# and Eq. 10 is promised where the ideal time is long beside it.
PROMISED_FROM_US = 40.0
_NOISE = 0.02  # two arms with one and the same plan differ by this


# (batch, shared, private), the telling ones first: what is left when time is over is not run.
_CHOSEN = (
    (32, 2048, 128), (32, 8192, 128), (128, 8192, 128), (32, 16384, 128), (128, 8192, 768), (8, 8192, 128),
    (8, 16384, 768),
)  # fmt: skip


class Point(NamedTuple):
    heads: Heads
    batch: int
    shared: int
    private: int


def relay_speedup(batch: int, shared: int, private: int) -> float:
    """Eq. 10 as printed: one query head per KV head, a token's key and value counted as one."""
    return (shared + private + 2) / (shared / batch + private + 7)


def relay_speedup_bytes(batch: int, shared: int, private: int, group: int) -> float:
    """Eq. 10 in bytes: keys and values both counted, queries, outputs and partial results `group` times.

    Equal to `relay_speedup` at two query heads per KV head, as many as there are tensors in the cache.
    """
    return (2 * (shared + private) + 2 * group) / (2 * (shared / batch + private) + 7 * group)


def run(bench: Bench) -> PartResult:
    """The whole grid with grouped heads; on CUDA chosen points, also with a KV head for each query head."""
    rows = bench.sweep(points(bench), lambda point: measure(bench, point))
    title = f"RelayAttention Fig. 1 and 5, {_DTYPE}; ms per call, x over sequence-first, Eq. 10"
    return PartResult(name="relay", title=title, rows=rows, checks=_checks(bench, rows))


def points(bench: Bench) -> list[Point]:
    if bench.is_cuda and not bench.quick:
        return [Point(heads, *shape) for shape in _CHOSEN for heads in (_GQA, _MHA)] + [Point(_GQA, 1, 8192, 128)]
    batches, lengths, privates = bench.pick(
        cuda=None, cpu=((32, 1, 8, 64, 128), (512, 2048, 8192, 16384), (128, 768)), quick=((1, 32), (512, 2048), (128,))
    )
    return [Point(_GQA, b, s, c) for c in privates for b in batches for s in lengths]


def measure(bench: Bench, point: Point) -> dict[str, Any]:
    heads, batch, shared, private = point
    if not bench.may_read(batch * (shared + private) * 4 * heads.kv * heads.dim):
        raise NotRun("too long for this device")
    scene = prefix_scene(batch, shared, private, **bench.options(heads, DTYPES[_DTYPE]))
    arms = [ours(scene), ours(scene, "never", "never")]
    peers = [lambda: flashinfer_decode(scene), lambda: flashinfer_cascade(scene, shared // scene.page_size)]
    peers = peers if batch > 1 else []
    if bench.may_copy(scene.bytes_apart):
        apart = unshared(scene, bench.ceilings.cache_bytes)
        arms += [ours(apart, "unshared", "never"), *contiguous(scene, bench.ceilings.cache_bytes)]
        peers.append(lambda: contiguous_by_head(scene, bench.ceilings.cache_bytes))
    times = bench.time(scene, arms, peers)
    names = ("auto", "never", "unshared", "contiguous", "flashinfer_decode", "flashinfer_cascade")
    row: dict[str, Any] = {"launched": times.launches(*names)}
    for arm in names:
        row[arm] = times.ms(arm) if arm in times else None
    for arm in ("never", "unshared", "contiguous", "flashinfer_decode", "flashinfer_cascade"):
        row[f"{arm}/auto"] = times.ratio(arm, "auto") if arm in times else None
    row |= _bounds(bench, scene, point)
    gain = row["unshared/auto"]
    return row | {"of_bound": None if gain is None else gain / min(row["eq10"], row["roof"])}


def _bounds(bench: Bench, scene: Scene, point: Point) -> dict[str, Any]:
    """What theory says; `roof` is the compute roof of the shared part."""
    heads, batch, shared, private = point
    copy = bench.ceilings.copy_bytes_per_s
    products_s = 4.0 * batch * shared * heads.q * heads.dim / bench.ceilings.flops_per_s[scene.q.dtype]
    return {
        "eq10_paper": relay_speedup(batch, shared, private),
        "eq10": relay_speedup_bytes(batch, shared, private, heads.group),
        "roof": scene.bytes_apart / copy / products_s,
        "ideal_us": max(scene.bytes_once / copy, products_s) * 1e6,
    }


def _checks(bench: Bench, rows: list[dict[str, Any]]) -> list[Check]:
    """Promised for the GPU."""
    measured = ran(rows) if bench.is_cuda else []
    batched = [row for row in measured if row["batch"] > 1]
    of_bound = least(
        row["of_bound"] for row in batched if row["of_bound"] is not None and row["ideal_us"] >= PROMISED_FROM_US
    )
    alone = least(row["never/auto"] for row in measured if row["batch"] == 1)
    long = least(row["never/auto"] for row in batched if (row["batch"], row["shared"]) == (32, 8192))
    cascade = least(row["flashinfer_cascade/auto"] for row in batched)
    decode = least(row["flashinfer_decode/auto"] for row in batched)
    return [
        at_least("gpu_two_phase_over_unshared_of_bound_from_40_us", of_bound, _SHARE_OF_BOUND),
        at_least("gpu_auto_over_never_batch_1", alone, 1.0, noise=_NOISE),
        at_least("gpu_auto_over_never_shared_8192_batch_32", long, 3.0),
        at_least("gpu_auto_over_flashinfer_decode_shared_prefix", decode, 1.0),
        at_least("gpu_auto_over_flashinfer_cascade", cascade, 1.0),
    ]
