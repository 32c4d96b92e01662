"""Draws a run as one HTML file without scripts, fonts or links: its figures, and plots as inline SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

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
    title: str, rows: Sequence[tuple[str, str]], answers: Sequence[Answer], plots: Sequence[str] = ()
) -> str:
    """Return the page: `rows` of figures by name, `plots`, and those of what was answered."""
    good = [answer for answer in answers if answer.error is None]
    began_s = min((answer.sent_s for answer in answers), default=0.0)
    firsts = [(answer.sent_s - began_s, 1e3 * (answer.latencies_s()["ttft"] or 0.0)) for answer in good]
    gaps = [1e3 * gap for answer in good for gap in answer.itl_s]
    ends = [1e3 * (answer.latencies_s()["e2e"] or 0.0) for answer in good]
    plots = (
        *plots,
        chart("Time to first token as the run went on", "s", "ms", {"TTFT": firsts}, dots=True),
        chart("In flight", "s", "requests", {"requests": _in_flight(answers, began_s)}),
        chart("Time to first token", "ms", "% of requests", {"TTFT": _shares([ms for _, ms in firsts])}),
        chart("Between tokens", "ms", "% of gaps", {"ITL": _shares(gaps)}),
        chart("Whole answer", "ms", "% of requests", {"E2E": _shares(ends)}),
        chart("Output", "s", "tokens/s", {"tokens/s": _tokens_per_s(good, began_s)}),
    )
    table = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1><table>{table}</table>{''.join(plots)}</html>\n"
    )


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
    for colour, points in zip(_COLOURS, drawn.values(), strict=False):
        places = [at(x, y) for x, y in points]
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
