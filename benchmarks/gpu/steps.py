"""How a GPU target runs: steps in processes of their own, each within its share of the time; one table, one archive.

A step is a set of jobs. A job yields rows, which are on disk at once: what a job that is cut short has found is kept.
The archive is written behind each step, so a target that is cut short has left what its steps found before.
Jobs run in processes that are forked before anything here has touched CUDA, so a job that crashes, hangs or leaves the
device in a bad state costs its own rows and nothing else.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import signal
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu.predictions import PREDICTED
from harness import NOT_RUN

TABLE_LINES = 40
_GRACE_S = 5.0  # a job sees its own end coming this long before it is killed
_LOG_BYTES = 200_000  # of a log that goes into the archive: its end


class Row(NamedTuple):
    """One figure."""

    name: str
    value: float | None  # None: it was not measured, and `note` says why
    unit: str = ""
    of_limit: float | None = None  # of the physical limit (bandwidth, matrix rate) that the figure is held against
    note: str = ""
    is_detail: bool = False  # kept in the archive, not shown in the table


Job = Callable[["Run"], Iterable[Row]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What every job is given."""

    is_dry: bool  # on the CPU or in the interpreter, at tiny shapes: the table says "dry" where a figure would stand
    folder: Path
    ends_s: float  # of `time.monotonic`; a job begins nothing behind it

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.is_dry else "cuda")

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.ends_s

    @property
    def left_s(self) -> float:
        return max(0.0, self.ends_s - time.monotonic())

    def pick(self, real: Any, dry: Any) -> Any:
        """One of two sizes."""
        return dry if self.is_dry else real


class Step(NamedTuple):
    """A part of a target."""

    name: str
    seconds: int  # its share of the target's time; what it leaves goes to the steps behind it
    jobs: Mapping[str, Job]
    num_at_once: int = 1
    must_pass: bool = False  # a job that fails ends the target


class Outcome(NamedTuple):
    """What became of a job."""

    rows: list[Row]
    error: str | None


def run_steps(target: str, steps: list[Step], folder: Path, *, is_dry: bool, budget_s: float) -> int:
    """Run a target's steps, print its table and write its archive, anew behind each step; 1 if a job failed."""
    folder.mkdir(parents=True, exist_ok=True)
    ends_s, rows, failed = time.monotonic() + budget_s, list[Row](), False
    for index, step in enumerate(steps):
        left_s = max(1.0, ends_s - time.monotonic())
        limit_s = left_s * step.seconds / sum(later.seconds for later in steps[index:])
        run = Run(is_dry=is_dry, folder=folder, ends_s=time.monotonic() + limit_s)
        print(f"{target}: {step.name}, at most {limit_s:.0f} s", flush=True)
        outcomes = run_jobs(step.jobs, run, step.num_at_once)
        rows += [row for outcome in outcomes.values() for row in outcome.rows]
        if len(step.jobs) > 1 and step.num_at_once > 1:
            took = None if is_dry else limit_s - run.left_s
            rows.append(Row(step.name, took, "s", note="" if is_dry else f"{len(step.jobs)} jobs"))
        errors = {name: outcome.error for name, outcome in outcomes.items() if outcome.error is not None}
        for name, error in errors.items():
            rows.append(Row(name, None, note=error))
            print(f"{target}: {name}: {error}", flush=True)
        failed = failed or bool(errors)
        if errors and step.must_pass:
            rows += [Row(later.name, None, note=f"{NOT_RUN}: {step.name} failed") for later in steps[index + 1 :]]
            break
        keep(target, rows, folder, is_dry)
    if not is_dry and all(row.value is None for row in rows):
        print(f"{target}: nothing was measured", flush=True)
        failed = True
    archive = keep(target, rows, folder, is_dry)
    print((folder / "table.txt").read_text())
    print(f"{target}: wrote {archive}")
    return int(failed)


def keep(target: str, rows: list[Row], folder: Path, is_dry: bool) -> Path:
    """Write a target's table, its rows and its archive."""
    (folder / "table.txt").write_text(table_of(target, rows, is_dry))
    (folder / f"{target}.json").write_text(json.dumps([row._asdict() for row in rows]) + "\n")
    return write_archive(target, folder)


def run_jobs(jobs: Mapping[str, Job], run: Run, num_at_once: int = 1) -> dict[str, Outcome]:
    """Each in a process of its own, so many at a time; killed a little after the run's end."""
    waiting, outcomes = list(jobs), dict[str, Outcome]()
    running: dict[int, tuple[str, Any]] = {}
    context = multiprocessing.get_context("fork")
    while waiting or running:
        while waiting and len(running) < num_at_once:
            name = waiting.pop(0)
            if run.is_late:
                outcomes[name] = Outcome([], f"{NOT_RUN}: out of time")
                continue
            process = context.Process(target=_job, args=(jobs[name], run, _path(run, name, "")))
            process.start()
            running[process.sentinel] = (name, process)
        left_s = max(0.0, run.ends_s + _GRACE_S - time.monotonic())
        for sentinel in connection.wait(list(running), timeout=left_s):
            name, process = running.pop(int(sentinel))  # type: ignore[arg-type]
            process.join()
            outcomes[name] = _outcome(run, name, process.exitcode)
        if running and time.monotonic() >= run.ends_s + _GRACE_S:
            for name, process in running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what it started
                process.join(_GRACE_S)  # one that a driver holds does not end
                outcomes[name] = _outcome(run, name, None)
            running.clear()
    return {name: outcomes[name] for name in jobs}


def _job(job: Job, run: Run, base: Path) -> None:
    """In the job's process: rows and output go to files."""
    os.setsid()
    log = os.open(base.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number in (1, 2):
        os.dup2(log, number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  # the parent's may be a test's
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)
    code = 1
    try:
        with open(base.with_suffix(".jsonl"), "w", buffering=1) as file:
            for row in job(run):
                file.write(json.dumps(_without_figures(row) if run.is_dry else row) + "\n")
        code = 0
    except BaseException as error:
        traceback.print_exc()
        said = [line for line in str(error).splitlines() if line.strip()] or ["failed"]
        print(said[0] if isinstance(error, SystemExit) else f"{type(error).__name__}: {said[0]}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no exit handlers of the process that was forked


def _without_figures(row: Row) -> Row:
    """A dry run's times say nothing: not even the archive holds them."""
    return Row(row.name, None, row.unit, note=row.note if row.note.startswith(NOT_RUN) else "", is_detail=row.is_detail)


def _outcome(run: Run, name: str, exit_code: int | None) -> Outcome:
    """`exit_code`: None of a job that was killed for its time."""
    path = _path(run, name, ".jsonl")
    rows = [Row(*json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    if exit_code is None:
        return Outcome(rows, f"stopped: out of time; see {path.with_suffix('.log').name}")
    if exit_code < 0:
        return Outcome(rows, f"died of signal {-exit_code}; see {path.with_suffix('.log').name}")
    return Outcome(rows, None if exit_code == 0 else _last_line(path.with_suffix(".log")))


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].strip()[:200] if lines else 'failed'}; see {log.name}"


def _path(run: Run, name: str, suffix: str) -> Path:
    return run.folder / ("".join(c if c.isalnum() else "-" for c in name) + suffix)


def table_of(target: str, rows: list[Row], is_dry: bool) -> str:
    """At most 40 lines: each figure, its prediction (or "none") and its share of the physical limit."""
    shown = [row for row in rows if not row.is_detail]
    cells = [("figure", "measured", "predicted", "of limit", "")]
    cells += [_cells(row, is_dry) for row in shown[: TABLE_LINES - 3]]
    if len(shown) > TABLE_LINES - 3:
        cells.append((f"... {len(shown) - TABLE_LINES + 3} more in {target}.json", "", "", "", ""))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    what = " DRY: all of it ran, at tiny shapes and without a device; nothing was measured" if is_dry else ""
    return "\n".join([f"== {target}{what}", *lines]) + "\n"


def _cells(row: Row, is_dry: bool) -> tuple[str, str, str, str, str]:
    predicted = PREDICTED.get(row.name)
    measured = (
        f"{row.value:.4g} {row.unit}".strip() if row.value is not None else "-" if row.note or not is_dry else "dry"
    )
    limit = "" if row.of_limit is None else f"{row.of_limit:.2f}"
    return row.name, measured, "none" if predicted is None else f"{predicted:.4g}", limit, row.note


def write_archive(target: str, folder: Path) -> Path:
    """The target's files in one, whole or not at all: in $OUT where that is set, else beside them. Of a long log, the
    end."""
    archive = Path(os.environ.get("OUT") or folder) / f"{target}.tar.gz"
    unfinished = archive.with_suffix(".part")
    with tarfile.open(unfinished, "w:gz") as tar:
        for path in sorted(folder.iterdir()):
            if path.suffix in (".txt", ".json", ".jsonl", ".log", ".xml"):
                content = path.read_bytes()[-_LOG_BYTES if path.suffix == ".log" else 0 :]
                entry = tarfile.TarInfo(f"{target}/{path.name}")
                entry.size, entry.mtime = len(content), int(path.stat().st_mtime)
                tar.addfile(entry, io.BytesIO(content))
    unfinished.replace(archive)
    return archive
