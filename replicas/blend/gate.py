"""What was measured of a model's answers when documents are reused: the gate of `blend.mode: auto`.

A report lies beside the model it was measured on, or in the cache folder if a replica had it made at the model's first
start (`first_report.py`), under a name made of weights, dtype and rotary table. One that is missing, damaged, of
another model or of too few cases allows nothing: then documents are computed in full.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.errors import ConfigError, shown
from mneme.replicas.documents import Selector

logger = logging.getLogger(__name__)

FORMAT = 1
MIN_CASES = 100  # of each layout: below, a score is known to no better than 3 points
MIN_SCORE_FULL = 0.2  # of full recompute: a task that the model cannot do has nothing to lose
TOLERANCE = 0.01  # of the score of a full prefill
_MAX_FILE_BYTES = 4 << 20
_OTHER_MODEL = "quality was measured on other weights, another dtype or another rotary table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One selector at one ratio on one layout of documents, and a full prefill of the same cases."""

    layout: str
    selector: Selector
    ratio: float  # share of the tokens behind the exact prefix
    num_cases: int
    score: float  # mean F1 of words
    score_full: float
    exact_match: float  # share of answers
    exact_match_full: float
    kl: float  # nats a token, of the full prefill's distribution against this one's
    top1: float  # share of answer tokens that are the full prefill's

    def __post_init__(self) -> None:
        if self.selector not in get_args(Selector):
            raise ConfigError(f"selector: must be one of {', '.join(get_args(Selector))} (got {shown(self.selector)})")
        for name in ("ratio", "score", "score_full", "exact_match", "exact_match_full", "top1"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}: must be from 0 to 1 (got {shown(getattr(self, name))})")
        if not math.isfinite(self.kl) or self.num_cases < 1:
            raise ConfigError(f"kl, num_cases: must be finite, at least 1 (got {self.kl}, {shown(self.num_cases)})")


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityReport:
    """Scores by layout, selector and ratio, and what they were measured on."""

    model: Mapping[str, str]  # `measured_on`
    task: str
    rows: tuple[Measured, ...]

    def allowed(self, tolerance: float = TOLERANCE) -> dict[Selector, float]:
        """Return by selector the smallest ratio from which on both scores of each layout are near those of full.

        Near: within `tolerance`. A ratio that was not measured on every layout, or on fewer than MIN_CASES cases, ends
        the search; a layout on which full recompute scores less than MIN_SCORE_FULL ends it for all.
        """
        layouts = {row.layout for row in self.rows}
        good: dict[tuple[Selector, float], set[str]] = {}
        for row in self.rows:
            # Scores are ratios of counts: a difference of exactly the tolerance is within it.
            lost = max(row.score_full - row.score, row.exact_match_full - row.exact_match)
            is_telling = row.num_cases >= MIN_CASES and row.score_full >= MIN_SCORE_FULL
            is_good = is_telling and lost <= tolerance + 1e-9
            good.setdefault((row.selector, row.ratio), set()).update({row.layout} if is_good else ())
        smallest: dict[Selector, float] = {}
        closed: set[Selector] = set()
        for (selector, ratio), passed in sorted(good.items(), key=lambda item: -item[0][1]):
            if passed != layouts:
                closed.add(selector)
            elif selector not in closed:
                smallest[selector] = ratio
        return smallest

    def write(self, folder: Path) -> Path:
        """Write the report where `read_gate` looks for it: all of it, or nothing that it would find."""
        path = report_path(folder, self.model)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")
        part.replace(path)
        return path

    @classmethod
    def read(cls, path: Path) -> QualityReport:
        """Read a report. Raises `OSError`, or `ConfigError` with the file's name for one that is damaged."""
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        try:
            return cls._parsed(content)
        except (ConfigError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not a quality report: {error}") from error

    @classmethod
    def _parsed(cls, content: bytes) -> QualityReport:
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigError(f"must have at most {_MAX_FILE_BYTES} bytes")
        fields = json.loads(content)
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise ConfigError(f"format: must be {FORMAT}")
        model, task, rows = (fields.get(name) for name in ("model", "task", "rows"))
        if not isinstance(model, dict) or not isinstance(task, str) or not isinstance(rows, list):
            raise ConfigError("model, task, rows: must be an object, a text and a list")
        if set(model) != {"weights", "dtype", "rope"} or not all(isinstance(each, str) for each in model.values()):
            raise ConfigError("model: must have weights, dtype and rope, which are texts")
        return cls(model=model, task=task, rows=tuple(_row(row) for row in rows))


def _row(row: Any) -> Measured:
    kinds = get_type_hints(Measured)
    if not isinstance(row, dict) or set(row) != set(kinds):
        raise ConfigError(f"rows: must have the fields {', '.join(kinds)}")
    for name, kind in kinds.items():
        wanted = {int: int, float: (int, float)}.get(kind, str)
        if isinstance(row[name], bool) or not isinstance(row[name], wanted):  # type: ignore[arg-type]
            raise ConfigError(f"rows.{name}: has the wrong type (got {shown(row[name])})")
    return Measured(**row)


class Gate(NamedTuple):
    """Says what of a model's documents may be reused in place where a request leaves that to the engine."""

    allowed: Mapping[Selector, float] = {}  # the smallest ratio of each
    why: str = "there is no quality report of this model"  # if nothing is
    ratios: tuple[float, ...] = ()  # all that were measured
    has_report: bool = False  # of this model, and readable

    def is_measured(self, selector: Selector, ratio: float) -> bool:
        """Return whether answers were measured to be as good as those of a full prefill."""
        return ratio >= self.allowed.get(selector, math.inf)

    def described(self) -> str:
        """Say what is allowed, or why nothing is."""
        allowed = ", ".join(f"{selector} from {ratio:g}" for selector, ratio in self.allowed.items())
        return f"the quality report allows {allowed}" if allowed else self.why


NO_REPORT = Gate()


def read_gate(folders: Sequence[Path], model: Callable[[], Mapping[str, str]]) -> Gate:
    """Return what the first report of the model in one of the folders allows; nothing if there is none.

    model  `measured_on`; asked only where there are reports

    One that cannot be read is a warning.
    """
    found = NO_REPORT
    for folder in folders:
        try:
            if not any(folder.glob("blend-*.json")):
                continue
            path = report_path(folder, model())
            if not path.exists():
                found = found if folder != folders[0] else Gate(why=_OTHER_MODEL)
                continue
            report = QualityReport.read(path)
            if report.model == model():
                return _gate_of(report)
            found = Gate(why=_OTHER_MODEL)
        except (ConfigError, OSError, ValueError) as error:
            logger.warning("documents are computed in full: the quality report cannot be read: %s", error)
            found = Gate(why="the quality report cannot be read")
    return found


def described_reports(folders: Sequence[Path], weights: str) -> list[str]:
    """Say of each report on these weights what it is of and what it allows; those first that `read_gate` takes.

    weights  their digest
    """
    said: dict[str, str] = {}
    for path in [path for folder in folders for path in sorted(folder.glob(f"blend-{weights[:12]}-*.json"))]:
        try:
            report = QualityReport.read(path)
        except (ConfigError, OSError) as error:
            said.setdefault(path.name, str(error))
            continue
        if report.model["weights"] == weights:
            said.setdefault(path.name, f"{report.model['dtype']}: {_gate_of(report).described()}")
    return list(said.values())


def _gate_of(report: QualityReport) -> Gate:
    ratios = tuple(sorted({row.ratio for row in report.rows}))
    why = "the quality report allows nothing" if report.rows else f"quality was not measured: {report.task}"
    return Gate(report.allowed(), why, ratios, has_report=True)


def measured_on(fingerprint: ModelFingerprint) -> dict[str, str]:
    """Return what a report holds for: weights, as what they are multiplied, the dtypes, the rotary table."""
    architecture, kv_dtype = json.loads(fingerprint.architecture or "{}"), fingerprint.layout.dtype
    form, dtype = architecture.get("weights"), architecture.get("computed_in", kv_dtype)
    parts = (dtype, form, None if dtype == kv_dtype else f"kv_{kv_dtype}")
    rope = json.dumps([f"{number:.12e}" for number in (*fingerprint.inv_freq, fingerprint.attention_factor)])
    return {
        "weights": fingerprint.weights,
        "dtype": "-".join(part for part in parts if part is not None),
        "rope": sha256(rope.encode()).hexdigest(),
    }


def report_path(folder: Path, model: Mapping[str, str]) -> Path:
    """Return where a model's report lies."""
    return folder / f"blend-{model['weights'][:12]}-{model['dtype']}-{model['rope'][:8]}.json"
