"""PNG plots in the form of the papers' figures, from a closing line alone; without matplotlib, none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import NOT_RUN
from plots import DIM, Points, bars, caption_of, colors, lines, plain, save

Rows = list[dict[str, Any]]
_ARMS = {
    "auto": "mneme", "never": "sequence-first, shared pages", "unshared": "sequence-first, own copies",
    "contiguous": "torch SDPA, contiguous", "flashinfer_decode": "FlashInfer decode",
    "flashinfer_cascade": "FlashInfer cascade", "flashinfer": "FlashInfer",
}  # fmt: skip
_RATES = {
    "auto_tok/s": "mneme", "never_tok/s": "sequence-first", "contiguous_tok/s": "torch SDPA, contiguous",
    "flashinfer_tok/s": "FlashInfer decode",
}  # fmt: skip


def draw(folder: Path, closing: Mapping[str, Any]) -> list[Path]:
    """One file per figure that has at least one point; returns their paths."""
    figures = {
        "relay_fig1_latency": ("relay", _relay_latency), "relay_fig5_speedup": ("relay", _relay_speedup),
        "chunk_fig3_token_rate": ("chunk", _chunk_rate), "chunk_fig4_batch": ("chunk", _chunk_batch),
        "chunk_fig5_first_token": ("chunk", _chunk_first), "pensieve_fig10": ("pensieve", _pensieve),
        "documents": ("documents", _documents), "share_regret": ("regret", _regret),
    }  # fmt: skip
    drawn = []
    for name, (part, plot) in figures.items():
        found = closing["results"].get(part, {"rows": []})["rows"]
        rows = [row for row in found if not str(row.get("status", "")).startswith(NOT_RUN)]
        if rows and plot(folder / f"{name}.png", caption_of(closing), rows):
            drawn.append(folder / f"{name}.png")
    return drawn


def _series(rows: Rows, x: str, names: Mapping[str, str]) -> dict[str, Points]:
    """Points of each column that has numbers, over ascending x."""
    ordered = sorted(rows, key=lambda row: row[x])
    found = {
        shown: [(row[x], row[column]) for row in ordered if row.get(column) is not None]
        for column, shown in names.items()
    }
    return {shown: points for shown, points in found.items() if points}


def _of_batch_32(rows: Rows) -> Rows:
    found = [row for row in rows if row["batch"] == 32 and row["private"] == 128]
    first_heads = found[0]["heads"] if found else None
    return [row for row in found if row["heads"] == first_heads]


def _relay_latency(path: Path, caption: str, rows: Rows) -> bool:
    chosen = _of_batch_32(rows)
    series, labels = _series(chosen, "shared", _ARMS), ("shared system prompt, tokens", "milliseconds per call")
    title = "Attention of 32 sequences with 128 own tokens behind a shared prompt (lower is better)"
    return bool(series) and save(path, title, f"heads {chosen[0]['heads']}, {caption}",
                                 lambda axes: lines(axes, series, *labels, log_x=True, log_y=True))  # fmt: skip


def _relay_speedup(path: Path, caption: str, rows: Rows) -> bool:
    theory = {"eq10": "theory: bytes (RelayAttention Eq. 10)", "roof": "theory: arithmetic"}
    measured = {"unshared/auto": "mneme, over own copies", "never/auto": "mneme, over shared pages"}
    chosen = _of_batch_32(rows)
    series = _series(chosen, "shared", measured | theory)
    labels = "shared system prompt, tokens", "times as fast as sequence-first"
    title = "Speed-up by reading a shared prompt once for 32 sequences (higher is better)"
    return bool(series) and save(
        path, title, f"heads {chosen[0]['heads']}, {caption}",
        lambda axes: lines(axes, series, *labels, log_x=True, dashed=list(theory.values())),
    )  # fmt: skip


def _chunk_rate(path: Path, caption: str, rows: Rows) -> bool:
    rated = [row for row in rows if row["batch"] == 32 and "auto_tok/s" in row]
    completions = sorted({row["completion"] for row in rated})
    panels = [
        lambda axes, new=new: lines(
            axes, _series([row for row in rated if row["completion"] == new], "shared", _RATES),
            f"shared tokens; {new} new", "tokens per second of the attention kernel", log_x=True,
        )
        for new in completions
    ]  # fmt: skip
    title = "Decoding 32 sequences behind shared tokens (higher is better)"
    return bool(panels) and save(path, title, caption, *panels, share_y=True)


def _chunk_batch(path: Path, caption: str, rows: Rows) -> bool:
    rated = [row for row in rows if row["shared"] == 1024 and "auto_tok/s" in row]
    shortest = min((row["completion"] for row in rated), default=0)
    series = _series([row for row in rated if row["completion"] == shortest], "batch", _RATES)
    labels = "sequences in the batch", "tokens per second of the attention kernel"
    title = f"Decoding behind 1,024 shared tokens, {shortest} new, by the size of the batch (higher is better)"
    return bool(series) and save(path, title, caption, lambda axes: lines(axes, series, *labels, log_x=True))


def _chunk_first(path: Path, caption: str, rows: Rows) -> bool:
    chosen = [row for row in rows if row["completion"] == 0 and row["batch"] == 32]
    series, labels = _series(chosen, "shared", _ARMS), ("shared tokens", "milliseconds")
    title = "Attention of the first new token of 32 sequences (lower is better)"
    return bool(series) and save(path, title, caption,
                                 lambda axes: lines(axes, series, *labels, log_x=True, log_y=True))  # fmt: skip


def _pensieve(path: Path, caption: str, rows: Rows) -> bool:
    names = {
        "ours": "mneme, KV where it lies", "copy_out": "copied together first", "rounds": "one token at a time",
        "ideal": "KV contiguous already (torch)",
    }  # fmt: skip
    title = "Attention of 8 new tokens each of 32 sequences over scattered KV (lower is better)"
    groups = [f"{row['context']:,}" for row in rows]
    return _columns(path, title, caption, rows, names, groups, "past tokens of a sequence")


def _documents(path: Path, caption: str, rows: Rows) -> bool:
    names = {
        "auto": "mneme, any positions", "equal_positions": "mneme, equal positions", "never": "sequence-first",
        "virtual": "queries rotated beforehand", "contiguous": "torch SDPA, contiguous",
    }  # fmt: skip
    title = "Attention over shared documents at different positions in each sequence (lower is better)"
    groups = [f"{row['documents']} of {row['of']}\n{row['dtype']}" for row in rows]
    return _columns(path, title, caption, rows, names, groups, "documents of 512 tokens that a sequence sees")


def _columns(
    path: Path, title: str, caption: str, rows: Rows, names: Mapping[str, str], groups: Sequence[str], x_label: str
) -> bool:
    """Milliseconds per call, a bar for each column that was measured."""
    series = {shown: [row.get(column) for row in rows] for column, shown in names.items()}
    series = {shown: values for shown, values in series.items() if any(value is not None for value in values)}
    return save(path, title, caption, lambda axes: bars(axes, groups, series, x_label, "milliseconds per call"))


def _regret(path: Path, caption: str, rows: Rows) -> bool:
    def scatter(axes: Any) -> None:
        kinds = sorted({row["kind"] for row in rows})
        for kind, color in colors(kinds).items():
            judged = [row for row in rows if row["kind"] == kind and row["regret"] is not None]
            x, y = [row["always"] / row["never"] for row in judged], [row["regret"] for row in judged]
            axes.plot(x, y, "o", label=kind, color=color, markersize=3.5)
        axes.axhline(1.1, linestyle="--", color=DIM, linewidth=1, label="promised: at most 1.1")
        axes.set_xscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            plain(axis)
        axes.set_xlabel("time if all is shared, over time if nothing is")
        axes.set_ylabel("time of the choice, over the better of both")

    return save(path, f"How good the choice to share is, at {len(rows)} shapes (lower is better)", caption, scatter)
