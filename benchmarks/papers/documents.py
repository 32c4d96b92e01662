"""Documents reused at any place of a prompt: CacheBlend Fig. 2 and 12 to 17.

Quality is counted in one process by `lab/quality`: questions of MuSiQue (`papers/musique.py`), codes in real text, and
the cross-chunk task of mneme-tiny, for each selector and ratio beside full recompute and full reuse. A point is a part
of a model's task. Times are served: documents are parts of a chat's message, arms are
its field `blend`, and each arm has a `cache_salt`, so that nothing is found that is not meant: `full` finds nothing,
`prefix` the system prompt and the first document, all others the documents behind another text. What bounds it, one
thread: rows that are computed, and a pass over all keys for each.
"""

from __future__ import annotations

import random
import re
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from plots import Points
from servers import Server, alone, play, start, told, words

from mneme.lab.bench.workloads import Piece, Session, Turn, arrive
from mneme.lab.quality.measure import Arm, measure
from mneme.lab.quality.tasks import Task, read_task
from mneme.replicas.config import EngineConfig
from mneme.replicas.documents import Selector
from mneme.replicas.engine.build import build_engine
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.directory import model_directory
from mneme.replicas.text.tokenizer import Tokenizer
from papers import musique
from papers.conversations import KV_BYTES, REAL, TINY
from papers.experiment import Experiment, Found, Ours, Point, spread, times

FULL, PREFIX, REUSE = "full", "prefix", "full reuse"
SELECTORS: tuple[Selector, ...] = ("hkvd", "query")
RATIOS = (0.05, 0.15, 0.3, 0.5)
BLENDS: dict[str, dict[str, Any]] = {
    REUSE: {"mode": "full_reuse", "min_tokens": 1},
    **{f"{name} 0.15": {"mode": "selective", "selector": name, "ratio": 0.15, "min_tokens": 1}
       for name in ("hkvd", "query", "first-k")},
}  # fmt: skip
OFF = {"mode": "off"}
PART_CASES = 10


class Quality(Experiment):
    """Fig. 12 and 16, and 7.2: F1, exact match, KL and top-1 by selector and ratio."""

    name, title, minutes = "cache-blend-quality", "CacheBlend Fig. 12 and 16: quality by selector and ratio", 240
    rows: tuple[str, ...] = ("B18", "B19")
    axes, bounds = ("share", "F1"), (FULL, REUSE)
    model, is_timed = "smollm2 and mneme-tiny", False
    tasks: dict[str, Sequence[str]] = {  # noqa: RUF012  # read only
        TINY: ("coreference:4x8", "coreference:8x4", "coreference:16x2"),
        REAL: ("retrieval:2x60", "retrieval:4x60", "retrieval:8x60", *(["musique"] if musique.FILE else [])),
    }
    num_cases: dict[str, int] = {TINY: 400, REAL: 100}  # noqa: RUF012  # read only

    def points(self) -> Iterable[Point]:
        if self.is_quick:
            return [{"of": TINY, "task": "coreference:4x8", "part": 0}]
        sizes = {(of, task): 100 if of == TINY else PART_CASES for of, tasks in self.tasks.items() for task in tasks}
        counts = {key: 150 if key[1] == "musique" else self.num_cases[key[0]] for key in sizes}
        return [{"of": of, "task": task, "part": part}
                for (of, task), size in sizes.items() for part in range(-(-counts[of, task] // size))]  # fmt: skip

    def open(self, stack: ExitStack) -> None:
        self._stack = stack
        self._engines: dict[str, tuple[Engine, Tokenizer]] = {}

    def measure(self, point: Point) -> Point:
        if point["of"] not in self._engines:
            tokenizer = Tokenizer.load(model_directory(point["of"]))
            config = EngineConfig(dtype="float32" if point["of"] == TINY else "bfloat16", num_threads=1)
            engine = build_engine(point["of"], config, tokenizer=tokenizer)
            self._engines[point["of"]] = engine, tokenizer
            self._stack.enter_context(closing(tokenizer))
            self._stack.enter_context(closing(engine))
        engine, tokenizer = self._engines[point["of"]]
        size = 4 if self.is_quick else 100 if point["of"] == TINY else PART_CASES
        first = point["part"] * size
        if point["task"] == "musique":
            task = Task("musique", {"6x512": musique.cases_of(tokenizer, first, size)})
        else:
            whole = read_task(point["task"], first + size)
            task = whole._replace(cases_by_layout={key: cases[first:] for key, cases in whole.cases_by_layout.items()})
        rows, _ = measure(engine, tokenizer, task, self.arms(point["of"]), max_tokens=16)
        found: Point = {
            "cases": rows[0].num_cases,
            "full F1": rows[0].score_full,
            "full exact": rows[0].exact_match_full,
        }
        for row in rows:
            name = f"{row.selector} {row.ratio:g}" if row.ratio else REUSE
            found |= {f"{name} F1": row.score, f"{name} exact": row.exact_match, f"{name} KL": row.kl,
                      f"{name} top-1": row.top1}  # fmt: skip
        return found

    def arms(self, of: str) -> list[Arm]:
        ratios = (0.15,) if self.is_quick else (0.05, 0.1, 0.15, 0.2, 0.3, 0.5) if of == TINY else RATIOS
        return [Arm("none", 0.0), *(Arm(selector, ratio) for selector in SELECTORS for ratio in ratios)]

    def ours(self, found: Found) -> dict[str, Ours]:
        over, lost = list[str](), list[str]()
        for of, tasks in self.tasks.items():
            for task in tasks:
                full, reuse = (mean(found, of, task, f"{arm} F1") for arm in (FULL, REUSE))
                best = {ratio: max(mean(found, of, task, f"{name} {ratio:g} F1") for name in SELECTORS)
                        for ratio in RATIOS}  # fmt: skip
                over.append(f"{task} {best[0.15] - reuse:+.2f}")
                lost.append(f"{task} {best[0.05] - full:+.3f}, {best[0.15] - full:+.3f}, {best[0.5] - full:+.3f}")
        note = "F1; mneme-tiny coreference, SmolLM2 all else; the better of `hkvd` and `query`"
        return {
            "B18": Ours(f"at 15%: {', '.join(over)}", bool(musique.FILE), note),
            "B19": Ours(f"at 5%, 15%, 50%: {'; '.join(lost)}", bool(musique.FILE), note),
        }

    def series(self, found: Found) -> Mapping[str, Points]:
        rows = [row for row in found if row["task"] == "retrieval:4x60"]
        if not rows:
            return {}
        shares = {name: [(ratio, statistics.mean(row[f"{name} {ratio:g} F1"] for row in rows)) for ratio in RATIOS]
                  for name in SELECTORS}  # fmt: skip
        series: dict[str, Points] = {"mneme, hkvd": shares["hkvd"], "query": shares["query"]}
        for name in (FULL, REUSE):
            series[name] = [(ratio, statistics.mean(row[f"{name} F1"] for row in rows)) for ratio in RATIOS]
        return series


class Chunks(Quality):
    """Fig. 2: quality over the number of chunks, computed in full and all reused."""

    name, title, minutes = "cache-blend-chunks", "CacheBlend Fig. 2: quality by number of chunks", 15
    rows, model, axes = ("B21",), REAL, ("passages", "F1")
    tasks: dict[str, Sequence[str]] = {  # noqa: RUF012  # read only
        REAL: ("retrieval:2x60", "retrieval:4x60", "retrieval:8x60", "retrieval:12x60")
    }

    def points(self) -> Iterable[Point]:
        return [{"of": REAL, "task": "retrieval:2x60", "part": 0}] if self.is_quick else super().points()

    def arms(self, of: str) -> list[Arm]:
        return [Arm("none", 0.0)]

    def ours(self, found: Found) -> dict[str, Ours]:
        told = [" / ".join(f"{mean(found, REAL, task, f'{arm} F1'):.2f}" for arm in (FULL, REUSE))
                for task in self.tasks[REAL]]  # fmt: skip
        note = "F1 of SmolLM2; codes in passages of real text, the right one always among them"
        return {"B21": Ours(f"full / reused in 2, 4, 8, 12 passages: {', '.join(told)}", note=note)}

    def series(self, found: Found) -> Mapping[str, Points]:
        tasks = {row["task"] for row in found}
        numbers = {task: int(re.findall(r"\d+", task)[0]) for task in self.tasks[REAL] if task in tasks}
        return {arm: [(numbers[task], mean(found, REAL, task, f"{arm} F1")) for task in numbers]
                for arm in (FULL, REUSE)}  # fmt: skip


def mean(found: Found, of: str, task: str, figure: str) -> float:
    """Over all cases of a task, whichever part they are of."""
    rows = [row for row in found if (row["of"], row["task"]) == (of, task)]
    return sum(row[figure] * row["cases"] for row in rows) / sum(row["cases"] for row in rows)


class Served(Experiment):
    """A request with documents, by arms that take turns."""

    model, is_served = REAL, True
    arms: tuple[str, ...] = (FULL, PREFIX, *BLENDS)

    def open(self, stack: ExitStack) -> None:
        (self._server,) = start(stack, TINY if self.is_quick else self.model, {"only": {}}).values()

    def ask(
        self, server: Server, arm: str, name: str, count: int, length: int, batch: int = 1, filler: int = 0
    ) -> float:
        """Milliseconds until all of a batch have their first token; `filler` tokens of others pass in between."""
        documents = [Piece(f"{name} document {index}", length, "", True) for index in range(count)]
        system, draw = words("system", 32), random.Random(name)

        def requests(what: str, chosen: Sequence[Sequence[Piece]]) -> list[Session]:
            return [Session(name=f"{name} {arm} {what} {index}", system=system, turns=[
                Turn(pieces=(*pieces, words(f"{name} {what} {index}", 64)), max_tokens=1)])
                for index, pieces in enumerate(chosen)]  # fmt: skip

        options = {"cache_salt": f"{name} {arm}", "blend": BLENDS.get(arm, OFF)}
        orders = [draw.sample(documents, count) for _ in range(batch)]
        if arm == PREFIX:
            play(server, requests("prefix", [order[:1] for order in orders]), **options)
        elif arm in BLENDS:
            play(server, requests("known", [documents]), **options)
        if filler:
            for index in range(2):
                play(server, [alone(f"{name} {arm} filler {index}", filler, 1)], cache_salt=f"filler {arm}")
        answers = play(server, requests("asked", orders), **options).answers
        sent = min(each.sent_s for each in answers)
        return 1e3 * max((each.first_s or each.ended_s) - sent for each in answers)


class FirstTokens(Served):
    """Fig. 12 (6 documents of 512 tokens), Fig. 15 (their number, length and the batch)."""

    name, title, minutes = "cache-blend-first-token", "CacheBlend Fig. 12 and 15: first tokens by arm", 50
    rows = ("B17", "B24")

    def points(self) -> Iterable[Point]:
        if self.is_quick:
            return [{"documents": 2, "tokens": 64, "batch": 1, "round": 0}]
        shapes = [(6, 512, 1, number) for number in range(5)]
        shapes += [(3, 512, 1, 0), (9, 512, 1, 0), (12, 512, 1, 0), (6, 128, 1, 0), (6, 256, 1, 0), (6, 900, 1, 0)]
        shapes += [(6, 256, 2, 0), (6, 256, 4, 0), (6, 256, 8, 0)]
        return [dict(zip(("documents", "tokens", "batch", "round"), shape, strict=True)) for shape in shapes]

    def measure(self, point: Point) -> Point:
        name = " ".join(map(str, point.values()))
        arms = self.arms if point["round"] % 2 else reversed(self.arms)
        shape = point["documents"], point["tokens"], point["batch"]
        return {f"{arm} ms": self.ask(self._server, arm, name, *shape) for arm in arms}

    def ours(self, found: Found) -> dict[str, Ours]:
        main = [row for row in found if (row["documents"], row["tokens"], row["batch"]) == (6, 512, 1)]
        ms = {arm: statistics.median(row[f"{arm} ms"] for row in main) for arm in self.arms}
        over = ", ".join(f"`{arm}` {times(ms[FULL] / ms[arm])}" for arm in self.arms if arm != FULL)
        gains = [row[f"{FULL} ms"] / row["query 0.15 ms"] for row in found]
        return {
            "B17": Ours(f"{over} sooner than full recompute", note="SmolLM2; what it does to answers: B19"),
            "B24": Ours(f"`query` 0.15 {spread(gains)} over numbers, lengths and batches", note="first token; SmolLM2"),
        }


class WeightForms(Served):
    """7.1, where the large models' weights have 8 bits: first tokens by form of the weights, 6 documents of 512."""

    name, title, minutes = "cache-blend-weights", "CacheBlend 7.1: first tokens with weights in 8 and 4 bits", 10
    rows = ("B25",)
    forms = ("dense", "int8", "int4")

    def points(self) -> Iterable[Point]:
        return [{"weights": form, "round": number} for number in range(1 if self.is_quick else 3)
                for form in (self.forms[:1] if self.is_quick else self.forms)]  # fmt: skip

    def open(self, stack: ExitStack) -> None:
        settings = {form: {"engine.weights": form} for form in self.forms}
        self._servers = start(stack, TINY if self.is_quick else self.model, settings)

    def measure(self, point: Point) -> Point:
        shape = (2, 64) if self.is_quick else (6, 512)
        server = self._servers[point["weights"]]
        return {f"{arm} ms": self.ask(server, arm, f"{point['round']}", *shape) for arm in self.arms}

    def ours(self, found: Found) -> dict[str, Ours]:
        def median(form: str, arm: str) -> float:
            return statistics.median(row[f"{arm} ms"] for row in found if row["weights"] == form)

        told = ", ".join(f"{form} {times(median(form, FULL) / median(form, 'query 0.15'))}" for form in self.forms)
        return {"B25": Ours(f"`query` 0.15 sooner than full recompute: {told}", False, "SmolLM2, not 34B and 70B")}


class Places(Served):
    """Fig. 17: documents on the device, in memory, on a disk."""

    name, title, minutes = "cache-blend-places", "CacheBlend Fig. 17: documents in memory and on a disk", 30
    rows = ("B20",)

    def points(self) -> Iterable[Point]:
        return [{"round": number} for number in range(1 if self.is_quick else 5)]

    def open(self, stack: ExitStack) -> None:
        model = TINY if self.is_quick else self.model
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mneme-"))
        self._shape = (2, 128) if self.is_quick else (6, 512)
        self._pool = 2048 if self.is_quick else 5120
        pool = {"engine.kv_cache_bytes": self._pool * KV_BYTES[model], "engine.max_context": self._pool - 256}
        disk = f"{{folder: {folder}, capacity_bytes: {8 << 30}}}"
        self._servers = start(stack, model, {
            "device": {}, "memory": {**pool, "cache.host_bytes": 1 << 30},
            "disk": {**pool, "cache.host_bytes": 8 << 20, "cache.disk": disk},
        })  # fmt: skip

    def measure(self, point: Point) -> Point:
        found: Point = {}
        for place, server in self._servers.items():
            filler = 0 if place == "device" else self._pool - 512
            for arm in (FULL, *BLENDS):
                name = f"{point['round']} {place}"
                found[f"{place} {arm} ms"] = self.ask(
                    server, arm, name, *self._shape, filler=0 if arm == FULL else filler
                )
        return found

    def ours(self, found: Found) -> dict[str, Ours]:
        def median(place: str, arm: str) -> float:
            return statistics.median(row[f"{place} {arm} ms"] for row in found)

        told = ", ".join(f"{place} {spread(median(place, FULL) / median(place, arm) for arm in BLENDS)}"
                         for place in ("device", "memory", "disk"))  # fmt: skip
        return {"B20": Ours(f"{told} sooner than full recompute", note="all selectors at 15%; files in the page cache")}


class Load(Served):
    """Fig. 14: first tokens by request rate, questions over 32 documents; the first half warms up."""

    name, title, minutes = "cache-blend-load", "CacheBlend Fig. 14: first tokens by request rate", 40
    rows = ("B23",)
    axes, is_log = ("requests/s", "first token, ms"), True
    arms = (FULL, PREFIX, "hkvd 0.15", "query 0.15")

    def points(self) -> Iterable[Point]:
        return [{"rate": rate} for rate in ((2.0,) if self.is_quick else (0.2, 0.4, 0.8, 1.6, 3.2))]

    def measure(self, point: Point) -> Point:
        count, length = (6, 32) if self.is_quick else (60, 256)
        draw, found = random.Random(f"{self.seed} load"), Point()
        pool = [Piece(f"{self.seed} pool {index}", length, "", True) for index in range(32)]
        asked = [draw.sample(pool, 4) for _ in range(count)]
        for arm in self.arms:
            sessions = [
                Session(name=f"{point['rate']} {arm} {index}", system=words("system", 32), turns=[
                    Turn(pieces=(*documents, words(f"{point['rate']} {index}", 24)), max_tokens=16)])
                for index, documents in enumerate(asked)
            ]  # fmt: skip
            options: dict[str, Any] = {"blend": BLENDS.get(arm, OFF)}
            if arm != FULL:  # which finds nothing: each request is another tenant's
                options["cache_salt"] = f"{point['rate']} {arm}"
            timed = arrive(sessions, point["rate"], 0.0, self.seed)
            played = play(self._server, timed, is_alone=arm == FULL, **options)
            late = sorted(played.answers, key=lambda each: each.due_s)[count // 2 :]
            found[f"{arm} ttft_ms"] = 1e3 * statistics.mean(
                (each.first_s or each.ended_s) - each.due_s for each in late
            )
            found[f"{arm} cached"] = told(played)["cached"]
        return found

    def ours(self, found: Found) -> dict[str, Ours]:
        bound = 2 * min(row[f"{FULL} ttft_ms"] for row in found)
        most = {
            arm: max((row["rate"] for row in found if row[f"{arm} ttft_ms"] <= bound), default=0.0) for arm in self.arms
        }
        shown = ", ".join(f"{arm} {rate:g}" for arm, rate in most.items())
        return {
            "B23": Ours(
                f"{shown} requests/s within {bound:,.0f} ms",
                False,
                "60 requests, half to warm up; twice the unloaded first token in full",
            )
        }

    def series(self, found: Found) -> Mapping[str, Points]:
        names = {arm: f"mneme, {arm}" if arm in BLENDS else arm for arm in self.arms}
        return {shown: sorted((row["rate"], row[f"{arm} ttft_ms"]) for row in found)
                  for arm, shown in names.items()}  # fmt: skip


EXPERIMENTS = (Quality, Chunks, FirstTokens, WeightForms, Places, Load)
