"""PNG plots in the form of the papers' figures, from the rows that were measured; without matplotlib, none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attention.bench import ran
from attention.report import PartResult

Rows = list[dict[str, Any]]


def draw(parts: Sequence[PartResult], folder: Path, device: str) -> list[Path]:
    """One file per figure that has at least one point; returns their paths."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed")
        return []
    matplotlib.use("Agg")
    figures: dict[str, tuple[tuple[str, Callable[[Any, Rows], bool]], ...]] = {
        "relay": (("relay_fig1_latency", _relay_latency), ("relay_fig5_speedup", _relay_speedup)),
        "chunk": (
            ("chunk_fig3_token_rate", _chunk_rate),
            ("chunk_fig4_batch", _chunk_batch),
            ("chunk_fig5_first_token", _chunk_first),
        ),
        "pensieve": (("pensieve_fig10", _pensieve),),
        "documents": (("documents", _documents),),
        "regret": (("share_regret", _regret),),
        "roofline": (("roofline", _roofline),),
    }
    drawn = []
    for part in parts:
        for name, plot in figures.get(part.name, ()):
            drawn += _draw_one(folder / f"{name}.png", plot, ran(part.rows), f"{part.title}\n{device}")
    return drawn


def _draw_one(path: Path, plot: Callable[[Any, Rows], bool], rows: Rows, title: str) -> list[Path]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.8))
    try:
        if not rows or not plot(axes, rows):
            return []
        axes.set_title(title, fontsize=7)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(path, dpi=110)
    finally:
        pyplot.close(figure)
    return [path]


def _lines(axes: Any, rows: Rows, x: str, columns: dict[str, str], style: str = "o-") -> bool:
    """A line per column that holds numbers, over ascending x."""
    drawn = False
    ordered = sorted(rows, key=lambda row: row[x])
    for column, label in columns.items():
        points = [(row[x], row[column]) for row in ordered if row.get(column) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=3)
            drawn = True
    return drawn


def _axes(axes: Any, x_label: str, y_label: str, *, log_x: bool = True, log_y: bool = False) -> None:
    if log_x:
        axes.set_xscale("log", base=2)
    if log_y:
        axes.set_yscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)


def _of_batch_32(rows: Rows) -> Rows:
    found = [row for row in rows if row["batch"] == 32 and row["private"] == 128]
    first_heads = found[0]["heads"] if found else None
    return [row for row in found if row["heads"] == first_heads]


def _relay_latency(axes: Any, rows: Rows) -> bool:
    arms = {
        "auto": "ours", "never": "sequence-first, shared pages", "unshared": "sequence-first, own copies",
        "contiguous": "SDPA, contiguous", "flashinfer_decode": "FlashInfer decode",
        "flashinfer_cascade": "FlashInfer cascade",
    }  # fmt: skip
    _axes(axes, "system prompt (tokens), batch 32, 128 private", "ms per call", log_y=True)
    return _lines(axes, _of_batch_32(rows), "shared", arms)


def _relay_speedup(axes: Any, rows: Rows) -> bool:
    chosen = _of_batch_32(rows)
    _axes(axes, "system prompt (tokens), batch 32, 128 private", "speed-up over sequence-first", log_y=True)
    drawn = _lines(axes, chosen, "shared", {"unshared/auto": "over own copies", "never/auto": "over shared pages"})
    theory = {"eq10": "Eq. 10 in bytes", "eq10_paper": "Eq. 10 as printed", "roof": "compute roof"}
    return _lines(axes, chosen, "shared", theory, "--") or drawn


_RATES = {
    "auto_tok/s": "ours", "never_tok/s": "sequence-first", "contiguous_tok/s": "SDPA, contiguous",
    "flashinfer_tok/s": "FlashInfer decode",
}  # fmt: skip


def _chunk_rate(axes: Any, rows: Rows) -> bool:
    rated = [row for row in rows if row["batch"] == 32 and "auto_tok/s" in row]
    _axes(axes, "shared tokens, batch 32", "tokens/s of the kernel")
    drawn = False
    for index, completion in enumerate(sorted({row["completion"] for row in rated})):
        chosen = [row for row in rated if row["completion"] == completion]
        columns = {column: f"{label}, {completion} new" for column, label in _RATES.items()}
        drawn = _lines(axes, chosen, "shared", columns, ("o-", "s--", "^:", "x-.")[index % 4]) or drawn
    return drawn


def _chunk_batch(axes: Any, rows: Rows) -> bool:
    rated = [row for row in rows if row["shared"] == 1024 and "auto_tok/s" in row]
    shortest = min((row["completion"] for row in rated), default=0)
    _axes(axes, f"batch size, 1,024 shared tokens, {shortest} new", "tokens/s of the kernel")
    return _lines(axes, [row for row in rated if row["completion"] == shortest], "batch", _RATES)


def _chunk_first(axes: Any, rows: Rows) -> bool:
    first = [row for row in rows if row["completion"] == 0 and row["batch"] == 32]
    _axes(axes, "shared tokens, batch 32", "ms, first completion token", log_y=True)
    arms = {"auto": "ours", "never": "sequence-first", "contiguous": "SDPA, contiguous", "flashinfer": "FlashInfer"}
    return _lines(axes, first, "shared", arms)


def _pensieve(axes: Any, rows: Rows) -> bool:
    arms = {"ours": "ours", "copy_out": "copy-out + contiguous", "rounds": "one token at a time", "ideal": "contiguous"}
    return _bars(axes, rows, "context", arms, "past KV tokens", "ms per call")


def _documents(axes: Any, rows: Rows) -> bool:
    arms = {
        "auto": "ours, a delta per row", "never": "sequence-first", "virtual": "virtual queries",
        "contiguous": "SDPA, contiguous", "equal_positions": "ours, one order",
    }  # fmt: skip
    for row in rows:
        row["shape"] = f"{row['documents']} of {row['of']}\n{row['dtype']}"
    return _bars(axes, rows, "shape", arms, "documents of 512 tokens per sequence", "ms per call")


def _bars(axes: Any, rows: Rows, x: str, columns: dict[str, str], x_label: str, y_label: str) -> bool:
    width = 0.8 / len(columns)
    for index, (column, label) in enumerate(columns.items()):
        places = [i + index * width for i in range(len(rows))]
        axes.bar(places, [row.get(column) or 0 for row in rows], width, label=label)
    axes.set_xticks([i + 0.4 for i in range(len(rows))], [str(row[x]) for row in rows], fontsize=7)
    _axes(axes, x_label, y_label, log_x=False)
    return True


def _regret(axes: Any, rows: Rows) -> bool:
    for kind in sorted({row["kind"] for row in rows}):
        points = [(row["always"] / row["never"], row["regret"]) for row in rows if row["kind"] == kind]
        axes.plot(*zip(*points, strict=True), "o", label=kind, markersize=3)
    axes.axhline(1.1, linestyle="--", color="grey", label="worst allowed")
    _axes(axes, "time of always over time of never", "time of auto over the better")
    return True


def _roofline(axes: Any, rows: Rows) -> bool:
    for module in ("qkv", "attention", "mlp", "output"):
        chosen = [row for row in rows if row.get("module") == module]
        if chosen:
            axes.plot([r["fused_intensity"] for r in chosen], [r["TFLOP/s"] for r in chosen], "o", label=module)
    roof = sorted((r["fused_intensity"], r["TFLOP/s"] / r["of_roof"]) for r in rows if "of_roof" in r)
    if not roof:
        return False
    axes.plot(*zip(*roof, strict=True), "--", color="grey", label="roof")
    _axes(axes, "flops per byte", "TFLOP/s", log_y=True)
    return True
