"""Attention alone, as the papers measure it: RelayAttention Fig. 1 and 5, ChunkAttention Fig. 3, Pensieve Fig. 10.

In process, one layer's call, one thread, bfloat16; every arm is checked against float64 before it is timed. Times are
the process's CPU time, which other programs change little, and arms take turns. Layers together overflow the last
cache. What bounds it: the bytes of KV that are read, once for all or once for each sequence, and the products.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from attention import relay
from attention.arms import contiguous, gathered, ours
from attention.bench import Bench, NotRun
from attention.machine import measure_ceilings
from attention.scenes import Heads, Scene, prefix_scene
from attention.timing import Arm
from plots import Points

from mneme.kernels.page_table import QueryRows
from papers.experiment import Experiment, Found, Ours, Point, at, spread, times

BFLOAT16 = torch.bfloat16
HEADS = {"32/8": Heads(32, 8, 128), "52/52": Heads(52, 52, 128), "32/32": Heads(32, 32, 128), "8/8": Heads(8, 8, 128)}


class Kernel(Experiment):
    model = "one layer of random keys and values"

    def open(self, stack: ExitStack) -> None:
        torch.set_num_threads(1)
        cpu = torch.device("cpu")
        self.bench = Bench(
            device=cpu, quick=self.is_quick, point_s=0.15 if self.is_quick else 2.0, seed=self.seed,
            ceilings=measure_ceilings(cpu, [BFLOAT16], now_s=time.process_time), now_s=time.process_time,
        )  # fmt: skip

    def options(self, heads: str) -> dict[str, Any]:
        return self.bench.options(HEADS[heads])


class Relay(Kernel):
    """RelayAttention Fig. 1 and 5: ms per call and the speed-up over sequence-first, beside Eq. 10."""

    name, title, minutes = "relay-kernel", "RelayAttention Fig. 1 and 5: attention by shared tokens, beside Eq. 10", 2
    rows = ("R9", "R10", "R11")
    axes, bounds = ("shared tokens", "x"), ("Eq. 10", "compute roof")

    def points(self) -> Iterable[Point]:
        if self.is_quick:
            return [{"heads": "32/8", "batch": 8, "shared": 512, "private": 128}]
        grid = [("32/8", batch, shared, private) for private in (128, 768) for batch in (32, 1, 8, 64)
                for shared in (512, 2048, 8192)]  # fmt: skip
        grid += [("32/8", 32, 4096, 128), ("32/8", 1, 16384, 128), ("32/8", 8, 16384, 128)]
        grid += [("52/52", 32, shared, 128) for shared in (256, 512, 1024)]
        return [dict(zip(("heads", "batch", "shared", "private"), shape, strict=True)) for shape in grid]

    def measure(self, point: Point) -> Point:
        try:
            found = relay.measure(self.bench, relay.Point(HEADS[point["heads"]], *[*point.values()][1:]))
        except NotRun as reason:
            return {"status": str(reason)}
        return {name: value for name, value in found.items() if value is not None}

    def ours(self, found: Found) -> dict[str, Ours]:
        ran = [row for row in found if "auto" in row]
        alone = [row["never/auto"] for row in ran if row["batch"] == 1]
        fig_1 = [row for row in ran if (row["heads"], row["batch"], row["private"]) == ("32/8", 32, 128)]
        told = ", ".join(f"{row['auto']:.0f} of {row['never']:.0f} ms at {row['shared']:,}"
                         for row in sorted(fig_1, key=lambda row: row["shared"]))  # fmt: skip
        bound = [row["of_bound"] for row in ran if row["batch"] >= 8 and "of_bound" in row]
        return {
            "R9": Ours(f"{spread(alone)} of sequence-first", note="an H100 0.99x, with the kernel of 26 Nov"),
            "R10": Ours(f"{told}, 32/8 heads", note="ours of sequence-first; 52 heads up to 1,024"),
            "R11": Ours(f"{spread(bound)} of the lower of Eq. 10 and the roof, median {statistics.median(bound):.2f}",
                        note="an H100 0.55 to 0.78 with 32 KV heads, with the kernel of 26 Nov"),
        }  # fmt: skip

    def series(self, found: Found) -> Mapping[str, Points]:
        rows = [row for row in found if (row["heads"], row["batch"], row["private"]) == ("32/8", 32, 128)]
        names = {"mneme over sequence-first": "unshared/auto", "Eq. 10": "eq10", "compute roof": "roof"}
        return {name: sorted((row["shared"], row[key]) for row in rows if key in row) for name, key in names.items()}


class Chunk(Kernel):
    """ChunkAttention Fig. 3: tokens per second of decoding by shared tokens, when 64, 512 and 1,024 are generated."""

    name, title, minutes = "chunk-kernel", "ChunkAttention Fig. 3: token rate by shared tokens", 2
    rows = ("C13",)
    axes = ("shared tokens", "x")
    paper: dict[int, float] = {512: 1.0, 8192: 3.0}  # noqa: RUF012  # read only

    def points(self) -> Iterable[Point]:
        shares, own = ((256,), (64,)) if self.is_quick else ((8192, 256, 512, 1024, 2048, 4096), (64, 512, 1024))
        return [{"shared": shared, "new": new} for new in own for shared in shares]

    def measure(self, point: Point) -> Point:
        batch = 4 if self.is_quick else 32
        scene = prefix_scene(batch, point["shared"], point["new"], **self.options("8/8" if self.is_quick else "32/32"))
        found = self.bench.time(scene, [ours(scene), ours(scene, "never", "never")])
        rates = {arm: batch * 1e3 / found.ms(arm) for arm in ("auto", "never")}
        return {
            "tok/s a layer": rates["auto"],
            "sequence-first tok/s": rates["never"],
            "x": found.ratio("never", "auto"),
        }

    def ours(self, found: Found) -> dict[str, Ours]:
        told = ", ".join(
            f"{times(at(found, shared=n, new=64)['x'])} at {n:,}" for n in (256, 512, 1024, 2048, 4096, 8192)
        )
        late = times(at(found, shared=8192, new=1024)["x"])
        return {
            "C13": Ours(
                f"{told}; {late} after 1,024 new tokens", note="over sequence-first; 32 heads, batch 32, as its Fig. 3"
            )
        }

    def series(self, found: Found) -> Mapping[str, Points]:
        return {f"mneme, {new} new": sorted((row["shared"], row["x"]) for row in found if row["new"] == new)
                  for new in (64, 512, 1024)} | {"the paper, at most": [*self.paper.items()]}  # fmt: skip


class Prompts(Kernel):
    """Pensieve Fig. 10: 8 query rows of each of 32 requests over pages, by the length of what came before."""

    name, title, minutes = "pensieve-kernel", "Pensieve Fig. 10: prompts over pages that are not contiguous", 10
    rows = ("P17",)
    axes = ("context, tokens", "ms")

    def points(self) -> Iterable[Point]:
        return [{"context": context} for context in ((256,) if self.is_quick else (512, 1024, 2048, 4096))]

    def measure(self, point: Point) -> Point:
        batch = 4 if self.is_quick else 32
        scene = prefix_scene(batch, 0, point["context"], rows_per_sequence=8, **self.options("8/8"))
        arms = [ours(scene), *contiguous(scene, self.bench.ceilings.cache_bytes), *gathered(scene), rounds(scene)]
        found = self.bench.time(scene, arms)
        named = {"ideal": "contiguous", "copy-out": "gather", "rounds": "rounds"}
        return {"ms": found.ms("auto")} | {f"{name}/ours": found.ratio(arm, "auto") for name, arm in named.items()}

    def ours(self, found: Found) -> dict[str, Ours]:
        ideal = spread(1 / row["ideal/ours"] for row in found)
        others = [spread(row[f"{name}/ours"] / row["ideal/ours"] for row in found) for name in ("copy-out", "rounds")]
        told = f"{ideal} of contiguous; copying out {others[0]}, rounds {others[1]}"
        return {"P17": Ours(told, note="its shape: batch 32, 8 rows, 512 to 4,096; 8 heads")}

    def series(self, found: Found) -> Mapping[str, Points]:
        rows = sorted(found, key=lambda row: float(row["context"]))
        names = {"contiguous": "ideal", "copied out": "copy-out", "a round for each token": "rounds"}
        series = {"mneme": [(row["context"], row["ms"]) for row in rows]}
        series |= {
            name: [(row["context"], row["ms"] * row[f"{key}/ours"]) for row in rows] for name, key in names.items()
        }
        return series


def rounds(scene: Scene) -> Arm:
    """A call for each row of a prompt, as single-query kernels do it; each row sees what is before it."""
    batch, num_rows = len(scene.tables), scene.rows_per_sequence
    positions = scene.rows.arrays()[1].reshape(batch, num_rows)
    sequences = [*range(batch)]
    plans = [scene.plan_of(scene.tables, QueryRows(sequences, positions[:, row]), "never") for row in range(num_rows)]
    queries = scene.q.view(batch, num_rows, *scene.q.shape[1:])

    def call(layer: int) -> torch.Tensor:
        outs = [scene.attend_rows(layer, plans[row], queries[:, row].contiguous())[0] for row in range(num_rows)]
        return torch.stack(outs, 1).flatten(0, 1)

    return Arm("rounds", call, len(scene.layers))


EXPERIMENTS = (Relay, Chunk, Prompts)
