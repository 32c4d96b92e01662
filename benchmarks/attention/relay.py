"""RelayAttention Fig. 1 and 5: latency, and the speed-up over sequence-first beside Eq. 10.

Two baselines stand for "sequence-first": `never` reads the very pages that `auto` reads, and finds what fits in the
last cache there; `unshared` reads pages of which every sequence has copies of its own, which is what Eq. 8 counts
(elements between memory and chip), so it is the one that Eq. 10 is held against. The compute roof is the time of the
shared part's products at the measured matrix rate, as a speed-up over reading all bytes at the measured copy rate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from attention.arms import contiguous, ours
from attention.bench import Bench, NotRun
from attention.optional_arms import contiguous_by_head, flashinfer_cascade, flashinfer_decode
from attention.scenes import Heads, Scene, prefix_scene, unshared


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


def measure(bench: Bench, point: Point) -> dict[str, Any]:
    heads, batch, shared, private = point
    if not bench.may_read(batch * (shared + private) * 4 * heads.kv * heads.dim):
        raise NotRun("too long for this device")
    scene = prefix_scene(batch, shared, private, **bench.options(heads))
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
