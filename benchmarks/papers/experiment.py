"""What the papers' experiments do alike: points that are measured one by one, kept, resumed, and told to the table.

An experiment is a figure or a table of a paper: a grid of points. All arms of a point take turns while it is measured,
so that an experiment may be cut between two points, and goes on another time with those that are left.
"""

from __future__ import annotations

import json
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from harness import Run, load_average, rounded
from plots import Points, caption_of, lines, save

RESULTS = Path(__file__).parents[1] / "results" / "papers"
TABLE = RESULTS / "table.json"
QUIET_LOAD = 4.0  # above it what is timed is of a machine that does other work, too
Point = dict[str, Any]  # its coordinates; what was measured of it is put beside them
Found = Sequence[Point]


class Ours(NamedTuple):
    """What the table says of one row."""

    figure: str
    is_full: bool = True
    note: str = ""


class Experiment(ABC):
    """One figure or table, or several that one grid has."""

    name: ClassVar[str]
    title: ClassVar[str]
    rows: ClassVar[tuple[str, ...]]  # of the table
    minutes: ClassVar[int]  # of all points, on two idle cores
    model: ClassVar[str]
    is_served: ClassVar[bool] = False
    is_timed: ClassVar[bool] = True  # False: what is counted is the same on a busy machine
    axes: ClassVar[tuple[str, str]] = ("", "")  # of the plot
    is_log: ClassVar[bool] = False
    bounds: ClassVar[Sequence[str]] = ()  # of its lines, what is no measurement of ours; the paper's are dashed, too

    def __init__(self, seed: int, *, is_quick: bool, vllm: str | None = None) -> None:
        """`vllm`: Python of an environment with its CPU build, which is an arm where it can do the work."""
        self.seed, self.is_quick, self.vllm = seed, is_quick, vllm

    @abstractmethod
    def points(self) -> Iterable[Point]:
        """The grid, the telling points first; with `is_quick` one or two that are done in a minute."""

    def open(self, stack: ExitStack) -> None:  # noqa: B027  # most have nothing to open
        """Make what all points need; the stack closes it."""

    @abstractmethod
    def measure(self, point: Point) -> Point:
        """Measure one point; the figures alone."""

    @abstractmethod
    def ours(self, found: Found) -> dict[str, Ours]:
        """Rows of the table, of all points."""

    def series(self, found: Found) -> Mapping[str, Points]:
        """Lines of the plot, ours beside the paper's own figures; none: nothing is drawn."""
        return {}


def run_points(experiment: Experiment, run: Run, seconds: float) -> bool:
    """Measure the points that the file in `--out` lacks, until the time is over; whether all are there now.

    Times that were measured beside other work are measured again on a quiet machine.
    """
    path = run.args.out / f"{experiment.name}.json"
    found = [] if run.args.again or not path.exists() else json.loads(path.read_text())["results"]
    points = [rounded(point) for point in experiment.points()]
    is_poor = is_busy if experiment.is_timed and load_average() <= QUIET_LOAD else lambda _rows: False
    found = [row for row in found if any(point.items() <= row.items() for point in points) and not is_poor([row])]
    left = [point for point in points if not any(point.items() <= row.items() for row in found)]
    run.say(f"{experiment.name}: {len(points) - len(left)} of {len(points)} points are there")
    ends_s = time.monotonic() + seconds
    with ExitStack() as stack:
        if left:
            experiment.open(stack)
        for point in left:
            if time.monotonic() > ends_s:
                run.say(f"{experiment.name}: out of time; the same command goes on")
                return False
            began_s = time.monotonic()
            figures = experiment.measure(point)
            took = {"load": load_average(), "took_s": time.monotonic() - began_s}
            found.append(rounded({**point, **figures, **took}))
            run.say(json.dumps(found[-1]))
            run.keep(found, model=experiment.model)
    closing = run.keep(found, model=experiment.model)
    if series := experiment.series(found):
        dashed = [name for name in series if name in experiment.bounds or name.startswith("the paper")]
        save(run.args.out / f"{experiment.name}.png", experiment.title, caption_of(closing),
             lambda axes: lines(axes, series, *experiment.axes, is_log=experiment.is_log, dashed=dashed))  # fmt: skip
    return True


def is_busy(found: Found) -> bool:
    """Whether the machine did other work in most points."""
    return statistics.median(row["load"] for row in found) > QUIET_LOAD


def tell_table(experiment: Experiment, found: Found, command: str, machine: str) -> None:
    """Write the experiment's rows into the table.

    Times beside other work are not full, and do not take the place of full ones.
    """
    table = json.loads(TABLE.read_text())
    ours = experiment.ours(found)
    for row in table:
        if row["row"] in ours:
            told = ours[row["row"]]
            is_full = told.is_full and not (experiment.is_timed and is_busy(found))
            if row["is_full"] and not is_full:
                continue
            note = "; ".join(filter(None, (f"papers/{experiment.name}.json", told.note)))
            row |= {
                "ours": told.figure, "command": command, "machine": machine, "device": "cpu",
                "is_full": is_full, "is_served": experiment.is_served, "note": note,
            }  # fmt: skip
    TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")


def at(found: Found, **coordinates: Any) -> Point:
    """The one point with these coordinates."""
    (only,) = (row for row in found if coordinates.items() <= row.items())
    return only


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def spread(values: Iterable[float], show: Any = times) -> str:
    """The least and the most, as one text."""
    ordered = sorted(values)
    low, high = show(ordered[0]), show(ordered[-1])
    return low if low == high else f"{low} to {high}"
