"""Conversations, served: Pensieve Fig. 3, 8 and 9; AttentionStore Fig. 14 to 18, 22, 25 and 26.

Arms are one server with other settings: `none` keeps nothing (and recomputes what a truncation leaves, as both papers'
baseline does), `device` keeps KV in its pool, `+host` in memory under it, `+disk` in files under that. Turns resend
their history as text, in a session. Lengths are drawn as the papers' data sets have them (Pensieve Table 2). What
bounds it, one thread: prompts that were not found, and decode steps, which no tier changes.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from plots import Points
from servers import Played, Server, alone, play, start, told, words

from mneme.lab.bench.workloads import Session, Turn, arrive
from mneme.lab.cache.costs import Prices
from papers.experiment import Experiment, Found, Ours, Point, percent, spread, times

NONE, DEVICE, HOST, DISK = "none", "device", "+host", "+disk"
REAL, TINY = "smollm2", "mneme-tiny"
KV_BYTES = {REAL: 2 * 30 * 3 * 64 * 2, TINY: 2 * 6 * 4 * 32 * 4}  # of a token, about
HOST_GB, DISK_GB = 128.0, 10_000.0  # that a machine of the paper's has


class Lengths(NamedTuple):
    turns: float
    tokens_in: float
    tokens_out: float


SHAREGPT, LMSYS = Lengths(7.58, 31.26, 180.44), Lengths(5.75, 64.27, 145.36)  # LMSYS: shorter answers


def conversations(
    lengths: Lengths, count: int, window: int | None, seed: int, answer_share: float = 1.0
) -> list[Session]:
    """Two turns and more; without a window they grow beyond it, with one they end before.

    `answer_share` of each answer is generated, and its question is as much longer: prompts stay most of the work.
    """
    draw, found = random.Random(f"{seed} {lengths}"), list[Session]()
    while len(found) < count:
        turns, total = list[Turn](), 0
        while len(turns) < 2 or draw.random() < 1 - 1 / (lengths.turns - 1):
            num_in, num_out = (1 + int(draw.expovariate(1 / mean)) for mean in lengths[1:])
            answer = max(int(num_out * answer_share), 1)
            total += num_in + num_out
            if window is not None and total > window:
                break
            turns.append(
                Turn(pieces=(words(f"{seed} {len(found)} {len(turns)}", num_in + num_out - answer),), max_tokens=answer)
            )
        if len(turns) >= 2:
            found.append(Session(name=f"{seed}-{len(found)}", turns=turns))
    return found


def tokens_of(sessions: Sequence[Session]) -> int:
    return sum(turn.pieces[0].num_words + turn.max_tokens for each in sessions for turn in each.turns)


def settings(arm: str, *, pool_bytes: int, host_bytes: int, folder: Path, window: int) -> dict[str, Any]:
    """What `mneme serve` is told for an arm."""
    given: dict[str, Any] = {"engine.kv_cache_bytes": pool_bytes, "engine.max_context": window}
    if arm == NONE:
        return given | {"engine.prefix_sharing": False, "engine.max_sessions": 0, "cache.enabled": False,
                        "engine.truncation.strategy": "recompute"}  # fmt: skip
    if arm == DEVICE:
        return given | {"cache.enabled": False}
    given["cache.host_bytes"] = host_bytes
    if arm == DISK:
        given["cache.disk"] = f"{{folder: {folder}, capacity_bytes: {8 << 30}}}"
    return given


class Hierarchy(Experiment):
    """AttentionStore 4.2 on its workload: a closed loop over a device for a fifth of all KV, memory for 30% more.

    A point is one arm's round, so that parts stay short; rounds interleave arms. The window is 2,048 tokens, which long
    conversations outgrow. The first fifth of the turns warms up.
    """

    name, title, minutes = "attention-store-served", "AttentionStore Fig. 14 to 17: its workload, served", 60
    rows = ("A19", "A20", "A21", "A22")
    axes = ("0: none, 1: device, 2: +host, 3: +disk", "first token, ms")
    model, is_served = REAL, True
    window, num_places, num_sessions, rounds = 2048, 8, 24, 3
    arms = (NONE, DEVICE, HOST, DISK)

    def points(self) -> Iterable[Point]:
        rounds, arms = (1, (NONE, DISK)) if self.is_quick else (self.rounds, self.arms)
        return [{"round": number, "arm": arm} for number in range(rounds) for arm in arms]

    def open(self, stack: ExitStack) -> None:
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mneme-")))

    def measure(self, point: Point) -> Point:
        """On a server of its own: nothing is found that another round left."""
        model = TINY if self.is_quick else self.model
        count = 3 if self.is_quick else self.num_sessions
        sessions = conversations(SHAREGPT, count, None, self.seed + point["round"], 0.25)
        num_bytes = tokens_of(sessions) * KV_BYTES[model]
        folder = self._folder / f"{point['round']}{point['arm']}"
        sizes = {
            "pool_bytes": max(num_bytes // 5, 2 * self.window * KV_BYTES[model]),
            "host_bytes": 3 * num_bytes // 10,
        }
        given = settings(point["arm"], **sizes, folder=folder, window=self.window)
        with ExitStack() as stack:
            (server,) = start(stack, model, {point["arm"]: given}).values()
            play(server, [alone("first", 4, 4)])
            played = play(server, sessions, self.num_places)
        return self.figures(played)

    def figures(self, played: Played) -> Point:
        busy = {kind: played.counts.get(kind, 0.0) for kind in ("prefill", "mixed", "decode")}
        found = {name: played.counts.get(name, 0.0) for name in ("device", "host", "disk", "recomputed", "dropped")}
        return {**told(played), "busy_s": sum(busy.values()), "prefill_s": busy["prefill"] + busy["mixed"], **found,
                "span_s": played.figures["duration_s"]}  # fmt: skip

    def ours(self, found: Found) -> dict[str, Ours]:
        def mean(arm: str, figure: str) -> float:
            return statistics.mean(row[figure] for row in found if row["arm"] == arm)

        def cost(arm: str) -> float:
            tiers = {HOST: (HOST_GB, 0.0), DISK: (HOST_GB, DISK_GB)}.get(arm, (0.0, 0.0))
            return Prices().hourly(mean(arm, "busy_s") / mean(NONE, "span_s"), *tiers)

        rates = {arm: mean(arm, "prompt") / mean(arm, "prefill_s") for arm in (NONE, DISK)}
        cached = percent(mean(DISK, "cached"))
        note = (
            f"SmolLM2, {self.num_sessions} conversations, a window of {self.window:,} that is outgrown, {cached} found"
        )
        share = percent(mean(NONE, "prefill_s") / mean(NONE, "busy_s"))
        bound = f"steps with prompts are {share} of what recomputing is busy with"
        return {
            "A19": Ours(f"{mean(DISK, 'ttft_ms') / mean(NONE, 'ttft_ms') - 1:+.0%}", note=note),
            "A20": Ours(times(rates[DISK] / rates[NONE]), note=note),
            "A21": Ours(f"{times(mean(NONE, 'busy_s') / mean(DISK, 'busy_s'))} less", note=f"{note}; {bound}"),
            "A22": Ours(f"{cost(DISK) / cost(NONE) - 1:+.0%}", note=f"{note}; {bound}"),
        }

    def series(self, found: Found) -> Mapping[str, Points]:
        places = {arm: place for place, arm in enumerate(self.arms)}
        return {"mneme": sorted((places[row["arm"]], row["ttft_ms"]) for row in found)}


class Overflow(Experiment):
    """AttentionStore Fig. 22: what is found where an overflow recomputes, and where KV is cut. Counted, not timed."""

    name, title, minutes = "attention-store-overflow", "AttentionStore Fig. 22: hits behind an overflow", 12
    rows = ("A26",)
    model, is_served, is_timed = TINY, True, False

    def points(self) -> Iterable[Point]:
        windows = (512,) if self.is_quick else (512, 1024)
        return [
            {"window": window, "strategy": strategy} for window in windows for strategy in ("reuse_kv", "recompute")
        ]

    def open(self, stack: ExitStack) -> None:
        arms = {f"{point['window']} {point['strategy']}": {
            "engine.max_context": point["window"], "engine.truncation.strategy": point["strategy"],
            "cache.enabled": False}
            for point in self.points()}  # fmt: skip
        self._servers = start(stack, self.model, arms, dtype="float32")

    def measure(self, point: Point) -> Point:
        """Each conversation outgrows the window several times; nothing is evicted."""
        lengths = Lengths(4 if self.is_quick else 20, 60, 24)
        sessions = conversations(lengths, 2 if self.is_quick else 16, None, self.seed)
        played = play(self._servers[f"{point['window']} {point['strategy']}"], sessions, 4)
        found = [(each.cached_tokens or 0) / each.prompt_tokens for each in played.answers if each.prompt_tokens]
        return {"found": statistics.mean(found), "turns": len(found)}

    def ours(self, found: Found) -> dict[str, Ours]:
        shares = {key: [row["found"] for row in found if row["strategy"] == key] for key in ("reuse_kv", "recompute")}
        reuse, recompute = (spread(values, percent) for values in shares.values())
        note = "of prompts, all turns of conversations that outgrow windows of 512 and 1,024; mneme-tiny"
        return {"A26": Ours(f"{reuse} against {recompute}", note=note)}


class Histories(Experiment):
    """A turn behind a history of N tokens, by where its KV is: Pensieve Fig. 3; AttentionStore Fig. 25, 26."""

    name, title, minutes = "histories", "Pensieve Fig. 3, AttentionStore Fig. 25, 26: a turn behind N tokens", 20
    rows: tuple[str, ...] = ("P16", "A15", "A16")
    axes, is_log = ("history, tokens", "first token, ms"), True
    model, is_served = REAL, True
    answer = 32  # tokens
    batch, pool_windows, num_fillers, host_bytes = 1, 1.5, 2, 1 << 30

    @property
    def num_at_once(self) -> int:
        return 1 if self.is_quick else self.batch

    def points(self) -> Iterable[Point]:
        histories = (256,) if self.is_quick else (4096, 1024, 2048, 7168)
        return [{"history": history, "new": 64, "round": number} for number in range(1 if self.is_quick else 3)
                for history in histories]  # fmt: skip

    def open(self, stack: ExitStack) -> None:
        model = TINY if self.is_quick else self.model
        window = 2048 if self.is_quick else 8192
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mneme-")))
        sizes = {
            "pool_bytes": int(self.pool_windows * window * KV_BYTES[model]),
            "host_bytes": self.host_bytes,
            "folder": folder,
            "window": window,
        }
        self._servers = start(stack, model, {arm: settings(arm, **sizes) for arm in (NONE, DEVICE, HOST)})
        self._filler = window - 256

    def measure(self, point: Point) -> Point:
        """Histories are known; for `+host` others' prompts take the whole pool before the turns come, all at once."""
        found, name = Point(), f"{self.seed} {point['history']} {point['new']} {point['round']}"
        systems = [words(f"{name} history {index}", point["history"]) for index in range(self.num_at_once)]
        for arm, server in self._servers.items():
            play(server, [alone(f"{name} first", 4, 1, system) for system in systems], 1)
            if arm == HOST:
                play(server, [alone(f"{name} filler {i}", self._filler, 1) for i in range(self.num_fillers)], 1)
            played = play(server, [alone(f"{name} turn", point["new"], self.answer, system) for system in systems])
            found |= {f"{arm} {figure}": value for figure, value in told(played).items() if "normalized" not in figure}
            found[f"{arm} busy_s"] = sum(played.counts.get(kind, 0.0) for kind in ("prefill", "mixed", "decode"))
        return found

    def ours(self, found: Found) -> dict[str, Ours]:
        def median(history: int, figure: str) -> float:
            return statistics.median(row[figure] for row in found if (row["history"], row["new"]) == (history, 64))

        longest = max(row["history"] for row in found)
        ms = {arm: median(longest, f"{arm} ttft_ms") for arm in (NONE, DEVICE, HOST)}
        output = {arm: median(longest, f"{arm} tok/s") for arm in (NONE, HOST)}
        firsts = {h: [median(h, f"{arm} ttft_ms") for arm in (NONE, DEVICE)] for h in (1024, 4096, longest)}
        told = ", ".join(f"{anew:,.0f} against {known:,.0f} ms behind {h:,}" for h, (anew, known) in firsts.items())
        sooner = [f"{ms[arm] / ms[NONE] - 1:+.1%}" for arm in (HOST, DEVICE)]
        return {
            "P16": Ours(told, note="SmolLM2"),
            "A15": Ours(f"{sooner[0]} from memory, {sooner[1]} on the device behind {longest:,}", False,
                        "SmolLM2's context ends at 8,192"),
            "A16": Ours(f"{output[NONE]:.2f} to {output[HOST]:.2f} tokens/s behind {longest:,}", False,
                        "answers of 32"),
        }  # fmt: skip

    def series(self, found: Found) -> Mapping[str, Points]:
        rows = [row for row in found if row["round"] == 0]
        names = {NONE: "computed anew", HOST: "mneme, from memory", DEVICE: "mneme, on the device"}
        return {names[arm]: sorted((row["history"], row[f"{arm} ttft_ms"]) for row in rows) for arm in names}


class Batches(Histories):
    """AttentionStore Fig. 18: sixteen turns of 1,000 tokens at once, by how much of each is history."""

    name, title, minutes = "histories-batch", "AttentionStore Fig. 18: sixteen turns of 1,000 tokens at once", 10
    rows = ("A23",)
    batch, pool_windows, num_fillers, host_bytes = 16, 2.25, 3, 6 << 30  # all points' histories and fillers

    def points(self) -> Iterable[Point]:
        histories = (500,) if self.is_quick else (500, 600, 700, 800, 900)
        return [{"history": history, "new": 1000 - history, "round": 0} for history in histories]

    def ours(self, found: Found) -> dict[str, Ours]:
        told = ["first token", "output"]
        for arm in (HOST, DEVICE):
            shorter = [row[f"{arm} ttft_ms"] / row[f"{NONE} ttft_ms"] - 1 for row in found]
            faster = [row[f"{arm} tok/s"] / row[f"{NONE} tok/s"] for row in found]
            place = "from memory" if arm == HOST else "on the device"
            told[0] += f" {spread(shorter, '{:+.0%}'.format)} {place}"
            told[1] += f" {spread(faster)} {place}"
        return {"A23": Ours(", ".join(told), note="500/500 to 900/100 tokens, batch 16; SmolLM2")}


class Chats(Experiment):
    """Pensieve Fig. 8: p90 of the normalized latency over the rate, stateless, with a device's cache, with memory."""

    name, title, minutes = "pensieve-chats", "Pensieve Fig. 8: latency by request rate, two data sets", 120
    rows = ("P18", "P19", "P21")
    model, is_served = REAL, True
    arms = (NONE, DEVICE, HOST)
    window, num_sessions, think_s = 2048, 24, 6.0
    datasets: dict[str, Lengths] = {"ShareGPT": SHAREGPT, "LMSYS": LMSYS}  # noqa: RUF012  # read only
    rates: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.2)

    def points(self) -> Iterable[Point]:
        datasets, rates = (["ShareGPT"], (2.0,)) if self.is_quick else ([*self.datasets], self.rates)
        return [{"data": data, "rate": rate} for rate in rates for data in datasets]

    def sessions(self, point: Point) -> list[Session]:
        count = 2 if self.is_quick else self.num_sessions
        drawn = conversations(self.datasets[point["data"]], count, self.window - 64, self.seed, 0.25)
        named = [replace(each, name=f"{point['data']} {point['rate']} {each.name}") for each in drawn]
        return arrive(named, point["rate"], self.think_s, self.seed)

    def measure(self, point: Point) -> Point:
        model, found = TINY if self.is_quick else self.model, Point()
        sessions = self.sessions(point)
        num_bytes = tokens_of(sessions) * KV_BYTES[model]
        sizes = {"pool_bytes": max(num_bytes // 5, 2 * self.window * KV_BYTES[model]), "host_bytes": num_bytes,
                 "folder": Path("unused"), "window": self.window}  # fmt: skip
        with ExitStack() as stack:
            servers: dict[str, Server] = start(stack, model, {arm: settings(arm, **sizes) for arm in self.arms})
            for arm, server in servers.items():
                play(server, [alone("first", 4, 4)])
                found |= {f"{arm} {figure}": value for figure, value in told(play(server, sessions)).items()}
        return found

    def most(self, found: Found, data: str) -> dict[str, float]:
        """The highest rate at which the p90 is within 4x the stateless one's at the lowest."""
        rows = [row for row in found if row["data"] == data]
        bound = 4 * min(row[f"{NONE} normalized_p90_ms"] for row in rows)
        return {arm: max((row["rate"] for row in rows if row[f"{arm} normalized_p90_ms"] <= bound), default=0.0)
                for arm in self.arms}  # fmt: skip

    def ours(self, found: Found) -> dict[str, Ours]:
        most = {data: self.most(found, data) for data in self.datasets}
        gains = ", ".join(f"{times(rates[HOST] / max(rates[NONE], 1e-9))} ({data})" for data, rates in most.items())
        alone_ = ", ".join(f"{rates[DEVICE]:g} of {rates[HOST]:g} requests/s ({data})" for data, rates in most.items())
        busiest = [row for row in found if row["rate"] == max(self.rates)]
        p90 = spread(
            (row[f"{HOST} normalized_p90_ms"] / row[f"{NONE} normalized_p90_ms"] - 1 for row in busiest),
            "{:+.0%}".format,
        )
        note = f"{self.model}, {self.num_sessions} conversations of its lengths, a quarter of each answer generated"
        return {
            "P18": Ours(f"{gains} the rate at 4x the unloaded p90; p90 {p90} at the highest", note=note),
            "P19": Ours(alone_, note=note),
            "P21": Ours("their lengths, random words", False, note),
        }


class LongChats(Chats):
    """Pensieve Fig. 9: the same with a context of 16,384, histories eight times as long."""

    name, title, minutes = "pensieve-long-chats", "Pensieve Fig. 9: a context of 16,384", 60
    rows = ("P20",)
    window, num_sessions = 8128, 12
    datasets: dict[str, Lengths] = {"ShareGPT": Lengths(7.58, 8 * 31.26, 8 * 45.0)}  # noqa: RUF012  # read only
    rates = (0.05, 0.1, 0.2, 0.4)

    def ours(self, found: Found) -> dict[str, Ours]:
        rates = self.most(found, "ShareGPT")
        note = "SmolLM2's context ends at 8,192"
        return {
            "P20": Ours(f"{times(rates[HOST] / max(rates[NONE], 1e-9))} the rate at 4x the unloaded p90", False, note)
        }


EXPERIMENTS = (Histories, Batches, Chats, LongChats, Hierarchy, Overflow)
