"""Draws a run as one HTML file without scripts, fonts or links: its figures, and plots as inline SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from mneme.lab.bench.measure import Answer

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 260, 58, 40, 34
_COLOURS = ("#0f6b4a", "#b5541c", "#2f5d9b")
_MAX_POINTS = 2000  # of a plot's line or cloud
_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 1em;color:#1d2630}"
    "table{border-collapse:collapse}td{padding:.15em 1.2em .15em 0;vertical-align:top}td+td{font-variant-numeric:"
    "tabular-nums}svg{font-size:12px;margin:.5em .5em 0 0}"
)
Points = Sequence[tuple[float, float]]


def html_report(
    title: str,
    rows: Sequence[Sequence[str]],
    answers_by_run: Mapping[str, Sequence[Answer]],
    plots: Sequence[str] = (),
    *,
    about: str = "",
) -> str:
    """Return the page.

    rows            figures: a name, and a text of each run
    answers_by_run  this run's, and perhaps those of one that it is held against
    plots           more of them, before those of the answers
    about           when and how it was made
    """
    runs = {name: _Run.of(answers) for name, answers in answers_by_run.items()}

    def of_each(points: Callable[[_Run], Points]) -> dict[str, Points]:
        return {name: points(run) for name, run in runs.items()}

    plots = (
        *plots,
        chart("Time to first token as the run went on", "s", "ms", of_each(lambda run: run.firsts), dots=True),
        chart("In flight", "s", "requests", of_each(lambda run: _in_flight(run.answers, run.began_s))),
        chart("Time to first token", "ms", "% of requests", of_each(lambda run: _shares([y for _, y in run.firsts]))),
        chart("Between tokens", "ms", "% of gaps", of_each(lambda run: _shares(run.gaps))),
        chart("Whole answer", "ms", "% of requests", of_each(lambda run: _shares(run.ends))),
        chart("Output", "s", "tokens/s", of_each(lambda run: _tokens_per_s(run.good, run.began_s))),
    )
    if len(runs) > 1:
        rows = [["", *runs], *rows]
    table = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1><p>{escape(about)}</p><table>{table}</table>{''.join(plots)}</html>\n"
    )


class _Run(NamedTuple):
    answers: Sequence[Answer]
    good: Sequence[Answer]
    began_s: float
    firsts: Points  # when it was sent, s, and its time to the first token, ms
    gaps: Sequence[float]  # ms
    ends: Sequence[float]  # ms

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> _Run:
        good = [answer for answer in answers if answer.error is None]
        began_s = min((answer.sent_s for answer in answers), default=0.0)
        firsts = [(answer.sent_s - began_s, 1e3 * (answer.latencies_s()["ttft"] or 0.0)) for answer in good]
        gaps = [1e3 * gap for answer in good for gap in answer.itl_s]
        return cls(answers, good, began_s, firsts, gaps, [1e3 * (each.latencies_s()["e2e"] or 0.0) for each in good])


def chart(title: str, x_unit: str, y_unit: str, points_by_name: Mapping[str, Points], *, dots: bool = False) -> str:
    """Return an SVG of lines, or of dots, over axes that begin at 0."""
    drawn = {name: _thinned(points) for name, points in points_by_name.items()}
    x_most = max((x for points in drawn.values() for x, _ in points), default=0.0) or 1.0
    y_most = 1.05 * max((y for points in drawn.values() for _, y in points), default=0.0) or 1.0
    width, height = _WIDTH - _LEFT - 16, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[str, str]:
        return f"{_LEFT + width * x / x_most:.1f}", f"{_TOP + height * (1 - y / y_most):.1f}"

    parts = [f'<text x="{_LEFT}" y="18" font-weight="600">{escape(title)}</text>']
    for step in range(5):
        (x, _), (_, y) = at(x_most * step / 4, 0), at(0, y_most * step / 4)
        parts += [
            f'<line x1="{_LEFT}" x2="{_LEFT + width}" y1="{y}" y2="{y}" stroke="#dde3e8"/>',
            f'<text x="{_LEFT - 6}" y="{y}" dy="4" text-anchor="end">{y_most * step / 4:.3g}</text>',
            f'<text x="{x}" y="{_HEIGHT - 22}" text-anchor="middle">{x_most * step / 4:.3g}</text>',
        ]
    axes = f"{y_unit} over {x_unit}" if any(drawn.values()) else "nothing was measured"
    parts.append(f'<text x="{_LEFT + width}" y="{_HEIGHT - 6}" text-anchor="end">{escape(axes)}</text>')
    for index, (colour, (name, points)) in enumerate(zip(_COLOURS, drawn.items(), strict=False)):
        places = [at(x, y) for x, y in points]
        if len(drawn) > 1:
            said = f'<text x="{_LEFT + index * 150}" y="{_HEIGHT - 6}" fill="{colour}">{escape(name[:22])}</text>'
            parts.append(said)
        if dots:
            parts += [f'<circle cx="{x}" cy="{y}" r="2" fill="{colour}" fill-opacity=".5"/>' for x, y in places]
        elif places:
            line = " ".join(f"{x},{y}" for x, y in places)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{"".join(parts)}</svg>'


def _thinned(points: Points) -> Points:
    return points[:: -(-len(points) // _MAX_POINTS)] if points else points


def _shares(values: Sequence[float]) -> Points:
    """What share of the values, in percent, is at most so large."""
    if not values:
        return []
    percents = np.linspace(0, 100, 201)
    return list(zip(np.percentile(values, percents).tolist(), percents.tolist(), strict=True))


def _in_flight(answers: Sequence[Answer], began_s: float) -> Points:
    changes = sorted([(answer.sent_s, 1) for answer in answers] + [(answer.ended_s, -1) for answer in answers])
    counts = np.cumsum([change for _, change in changes]).tolist()
    return [(when_s - began_s, count) for (when_s, _), count in zip(changes, counts, strict=True)]


def _tokens_per_s(good: Sequence[Answer], began_s: float) -> Points:
    """Rates of 60 equal spans; an answer's tokens come evenly from its first chunk to its last."""
    spans = [(a.first_s - began_s, a.last_s - began_s, a.output_tokens or 0) for a in good if a.first_s and a.last_s]
    if not spans:
        return []
    edges = np.linspace(0, max(max(last_s for _, last_s, _ in spans), 1e-6), 61)
    done = np.zeros(61)
    for first_s, last_s, tokens in spans:
        done += tokens * np.clip((edges - first_s) / max(last_s - first_s, 1e-9), 0, 1)
    rates = np.diff(done) / np.diff(edges)
    return list(zip(((edges[1:] + edges[:-1]) / 2).tolist(), rates.tolist(), strict=True))
