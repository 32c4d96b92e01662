"""AttentionStore's hit rates at its own scale: Fig. 13, 21, 23, 24, by the simulator on the product's own tiers.

The paper's workload: conversations with ShareGPT's lengths, 5.75 turns on average, that begin by Poisson, one a second;
the first fifth of the turns warms up. Models differ in bytes of KV per token alone (4.2: 0.78 MB LLaMA-13B, 2.5 MB 65B,
0.31 MB 70B, 0.12 MB Falcon-40B); a device has 10 GB for KV, a node 128 GB of memory and 10 TB of SSD. A block is 256
tokens, as a chunk of ours. What bounds it: this interpreter; no second of it is told.

Of a conversation's last turn nothing more is asked, so even a cache without a bound finds less than all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from plots import Points

from mneme.lab.cache.simulator import CacheSimulator
from mneme.lab.cache.synthetic import SyntheticShape, make_trace
from mneme.lab.cache.traces import TraceRequest, most_used_within
from papers.experiment import Experiment, Found, Ours, Point, at, percent, spread

BLOCK_TOKENS = 256
KV_MB = {"LLaMA-13B": 0.78, "LLaMA-65B": 2.5, "LLaMA-70B": 0.31, "Falcon-40B": 0.12}
PAPER = {"LLaMA-13B": (0, 0.034, 0.86), "LLaMA-65B": (0, 0.017, 0.71), "LLaMA-70B": (0, 0.077, 0.89),
         "Falcon-40B": (0, 0.191, 0.90)}  # fmt: skip
DEVICE_GB, HOST_GB, DISK_GB = 10.0, 128.0, 10_000.0
THINK_S = 240.0
TTL_S = 3600.0
PREFETCHED = 32  # requests that are read ahead for: the simulator's time grows with the square


@lru_cache(maxsize=2)
def trace_of(num_sessions: int, seed: int) -> list[TraceRequest]:
    shape = SyntheticShape(
        num_sessions=num_sessions, num_turns=5.75, think_s=THINK_S, system_tokens=0, max_tokens=4096, seed=seed
    )
    return make_trace(shape, BLOCK_TOKENS)


def blocks(gigabytes: float, model: str) -> int:
    return int(gigabytes * 1e3 / (KV_MB[model] * BLOCK_TOKENS))


class Simulated(Experiment):
    """Points of the simulator: a trace, sizes of tiers in blocks, a policy, a queue."""

    model = "bytes of KV per token alone"
    is_timed = False
    num_sessions, host_gb = 9000, HOST_GB

    @property
    def trace(self) -> list[TraceRequest]:
        return trace_of(300 if self.is_quick else self.num_sessions, self.seed)

    def find(self, sizes: list[int | None], policy: str, queue: int = 0, *, prefetch: bool = False) -> Point:
        """What the turns behind the warm-up find: blocks by tier over those that a conversation has said before."""
        turns, num_warm = self.trace, len(self.trace) // 5
        seen, after, before = set[int](), 0, list[int]()
        simulator = CacheSimulator(turns, sizes, policy, queue=queue, prefetch=prefetch)
        for place, turn in enumerate(turns):
            if place >= num_warm:
                after += sum(block in seen for block in turn.block_ids)
            seen.update(turn.block_ids)
        places = iter(range(1, len(turns) + 1))

        def look() -> None:
            if next(places) == num_warm:
                before.extend(tier.num_found for tier in simulator.tiers.tiers)

        outcome = simulator.run(look)
        found = [tier.num_found - early for tier, early in zip(outcome.tiers, before, strict=True)]
        shares = {name: count / after for name, count in zip(("device", "host", "disk"), found, strict=False)}
        return {"found": sum(found) / after, **shares}


class Tiers(Simulated):
    """Fig. 13 and 24: what is found with a device alone, with memory, with disks."""

    name, title, minutes = "attention-store-tiers", "AttentionStore Fig. 13 and 24: hit rates by tiers", 8
    rows = ("A17",)
    axes = ("0: device, 1: with memory, 2: with disks", "found")

    def points(self) -> Iterable[Point]:
        models = ["LLaMA-13B"] if self.is_quick else [*KV_MB]
        return [{"kv of": model, "tiers": tiers} for model in models for tiers in ("device", "+host", "+disk")]

    def measure(self, point: Point) -> Point:
        count = ("device", "+host", "+disk").index(point["tiers"]) + 1
        sizes: list[int | None] = [blocks(size, point["kv of"]) for size in (DEVICE_GB, HOST_GB, DISK_GB)[:count]]
        return {**self.find(sizes, "returning"), "paper": PAPER[point["kv of"]][count - 1]}

    def ours(self, found: Found) -> dict[str, Ours]:
        shares = {tiers: spread((row["found"] for row in found if row["tiers"] == tiers), percent)
                  for tiers in ("device", "+host", "+disk")}  # fmt: skip
        note = "simulated at the paper's scale: 9,000 conversations, the bytes of its four models, our own policy"
        return {"A17": Ours(" / ".join(shares.values()) + " (device, with memory, with disks)", note=note)}

    def series(self, found: Found) -> Mapping[str, Points]:
        places = {name: place for place, name in enumerate(("device", "+host", "+disk"))}
        series: dict[str, list[tuple[float, float]]] = {}
        for row in found:
            for whose, share in (("mneme", row["found"]), ("the paper", row["paper"])):
                series.setdefault(f"{whose}, {row['kv of']}", []).append((places[row["tiers"]], share))
        return series


class LookAhead(Simulated):
    """Fig. 21: who sees the queue beside who does not, with 2 and 10 TB of SSD, and with memory for 1 to 2%.

    The queue holds the requests that come next: 128 of them, or 32, for which the disk is read ahead, too. `min` knows
    all of the future.
    """

    name, title, minutes = "attention-store-look-ahead", "AttentionStore Fig. 21: look-ahead beside LRU and FIFO", 9
    rows = ("A18",)
    disks_gb: tuple[int, ...] = (2_000, 10_000)
    is_at_scale = True
    arms = (("lookahead", 128), ("lookahead", 32), ("lru", 0), ("fifo", 0), ("returning", 0), ("min", 0))

    def points(self) -> Iterable[Point]:
        disks = self.disks_gb[:1] if self.is_quick else self.disks_gb
        return [{"disk_gb": disk, "policy": name, "queue": queue} for disk in disks for name, queue in self.arms[::-1]]

    def measure(self, point: Point) -> Point:
        sizes: list[int | None] = [0, *(blocks(size, "LLaMA-65B") for size in (self.host_gb, point["disk_gb"]))]
        return self.find(sizes, point["policy"], point["queue"], prefetch=point["queue"] == PREFETCHED)

    def ours(self, found: Found) -> dict[str, Ours]:
        told = []
        for disk in self.disks_gb:
            shares = {arm: at(found, disk_gb=disk, policy=arm[0], queue=arm[1])["found"] for arm in self.arms}
            shown = (
                f"{name}{f' {queue}' if queue else ''} {percent(share)}" for (name, queue), share in shares.items()
            )
            told.append(f"{disk:,} GB: {', '.join(shown)}")
        hosts = [percent(at(found, disk_gb=self.disks_gb[-1], policy=policy, queue=queue)["host"])
                 for policy, queue in (("lookahead", PREFETCHED), ("lru", 0))]  # fmt: skip
        what = f"simulated, LLaMA-65B's bytes, {self.num_sessions:,} conversations, {self.host_gb:g} GB of memory"
        note = f"{what}, queues of 128 and 32; found in memory {hosts[0]}, with LRU {hosts[1]}"
        return {"A18": Ours("; ".join(told), self.is_at_scale, note)}


class ScarceLookAhead(LookAhead):
    """The same with 300 conversations at a time, memory for 0.2% of their KV, and disks for 4 and 11%."""

    name, title, minutes = "attention-store-look-ahead-scarce", "AttentionStore Fig. 21, a thirtieth of its size", 1
    num_sessions, host_gb, disks_gb, is_at_scale = 300, 2.0, (40, 100), False


class Capacity(Simulated):
    """Fig. 23: what is found by the capacity over the most that an hour's sessions can fill (CCpUT)."""

    name, title, minutes = "attention-store-capacity", "AttentionStore Fig. 23: hit rate by RCC / CCpUT", 5
    rows = ("A27",)
    axes = ("capacity over CCpUT", "found")
    paper: dict[float, float] = {0.1: 0.51, 0.25: 0.98}  # noqa: RUF012  # read only

    def points(self) -> Iterable[Point]:
        return [
            {"ratio": ratio} for ratio in ((0.1, 0.25) if self.is_quick else (0.05, 0.1, 0.15, 0.2, 0.25, 0.5, 1.0))
        ]

    def measure(self, point: Point) -> Point:
        """CCpUT: the sessions of an hour, each with a window of 4,096 tokens."""
        hour = most_used_within(self.trace, TTL_S)
        sessions = min(TTL_S, len({turn.block_ids[0] for turn in self.trace}))
        most = int(sessions) * 4096 // BLOCK_TOKENS
        found = self.find([0, int(point["ratio"] * most)], "returning")
        return {**found, "hour_blocks": hour, "ccput_blocks": most, "paper": self.paper.get(point["ratio"])}

    def ours(self, found: Found) -> dict[str, Ours]:
        shares = [f"{percent(row['found'])} at {row['ratio']:g}" for row in found]
        return {"A27": Ours(", ".join(shares), note="simulated; one session a second, an hour, windows of 4,096")}

    def series(self, found: Found) -> Mapping[str, Points]:
        return {whose: [(row["ratio"], row[key]) for row in found if row[key] is not None]
                  for whose, key in (("mneme", "found"), ("the paper", "paper"))}  # fmt: skip


EXPERIMENTS = (Tiers, LookAhead, ScarceLookAhead, Capacity)
