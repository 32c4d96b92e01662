"""`mneme quality`: what reusing documents in place does to a model's answers, and what settings do to its predictions.

No Ray; engines are in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args, get_type_hints

from mneme.config import parse
from mneme.errors import ConfigError, shown
from mneme.lab.options import Option, add_options, check_options
from mneme.replicas.blend.gate import MIN_CASES, MIN_SCORE_FULL, Measured, QualityReport
from mneme.replicas.config import EngineConfig
from mneme.replicas.documents import SELECTORS, Selector

if TYPE_CHECKING:
    from mneme.lab.quality.tasks import Task

_SELECTORS = tuple(each for each in SELECTORS if each != "all")  # that one is full recompute, in two steps
_RATIOS = "0.05,0.1,0.15,0.2,0.3,0.5"
_QUICK_CASES = 20
_QUICK_RATIOS = "0.15"
_BACKGROUND_ROWS = 256  # of a step: of 2,048 one took six seconds beside others, in which it did not pause
_TEXT, _WINDOWS, _QUICK_WINDOWS = "text", "4x1500", "1x500"
_SETTINGS = "weights=dense,weights=auto,weights=int8,weights=int4,kv_dtype=int8"


_TASK_HELP = (
    'FILE of JSON lines {"question", "passages", "answers"}, or made: retrieval[:4x60,8x30], a code in real text '
    "(documents x words), or coreference[:4x8,8x4,16x2], which mneme-tiny can do (documents x sentences); auto: "
    "those of them that the model can do, from the largest ratio down, as a server has it done at a model's first "
    f"start. {_TEXT}[:{_WINDOWS}] (windows x tokens) has no documents: it compares --settings on running text"
)
_OPTIONS = (
    Option("--selectors", "NAMES", f"by commas, of {', '.join(SELECTORS)} (default: all but all)"),
    Option(
        "--settings", "SETTINGS",
        f"by commas, engine options to compare on {_TEXT}, joined by + where several are changed; the first is the "
        f"reference (default: {_SETTINGS}, as far as they run here)",
    ),
    Option("--ratios", "SHARES", f"by commas, from 0 to 1 (default {_RATIOS})"),
    Option("--cases", "N", "of each layout, at most (default 400)", int, None, (1, 100_000)),
    Option("--max-tokens", "N", "of an answer (default 32)", int, None, (1, 32_768)),
    Option("--device", "DEVICE", "auto, cpu or cuda[:index]", default="auto"),
    Option(
        "--dtype", None, "that the model is served in: a report is for one", str, "auto", None,
        get_args(get_type_hints(EngineConfig)["dtype"]),
    ),
    Option(
        "--weights", None, "that it is served with, likewise", str, "auto", None,
        get_args(get_type_hints(EngineConfig)["weights"]),
    ),
    Option(
        "--kv-dtype", None, "that it keeps KV in, likewise", str, "auto", None,
        get_args(get_type_hints(EngineConfig)["kv_dtype"]),
    ),
    Option("--background", "S", "for a server: so much processor time, while its input says 1", float, None, (1, 1e6)),
    Option("--out", "DIR", "folder of the report (default: the model's)", Path),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=quality)
    parser.add_argument("model", help="as `mneme serve` takes it: mneme-tiny, smollm2, a directory, a GGUF file")
    parser.add_argument("--task", required=True, metavar="TASK", help=_TASK_HELP)
    add_options(parser, _OPTIONS)
    quick = (
        f"{_QUICK_CASES} cases at ratio {_QUICK_RATIOS}, or {_TEXT}:{_QUICK_WINDOWS}; no report, unless --out says so"
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--force", action="store_true", help="replace a report of more cases, or of other layouts")


def quality(args: argparse.Namespace) -> int:
    """Measure, write the report, and say what it allows. Raises `MnemeError`."""
    kind, _, layout = args.task.partition(":")
    is_comparison = kind == _TEXT and not Path(args.task).exists()
    needless = ("selectors", "ratios", "cases", "max_tokens", "background") if is_comparison else ("settings",)
    for name in needless:
        if getattr(args, name) is not None:
            rule = f"says nothing of --task {shown(args.task)}"
            raise ConfigError(f"{name.replace('_', '-')}: {rule}")
    if is_comparison:
        return _compare_settings(args, layout or (_QUICK_WINDOWS if args.quick else _WINDOWS))
    ratios = [_ratio(each) for each in (args.ratios or (_QUICK_RATIOS if args.quick else _RATIOS)).split(",")]
    selectors = [_selector(each) for each in args.selectors.split(",")] if args.selectors else _SELECTORS
    num_cases = args.cases if args.cases is not None else _QUICK_CASES if args.quick else 400
    max_tokens = 32 if args.max_tokens is None else args.max_tokens
    check_options(args, _OPTIONS)

    from mneme.lab.quality.first_report import Background, OutOfTime, measure_first
    from mneme.lab.quality.measure import Arm, measure
    from mneme.lab.quality.tasks import read_task
    from mneme.replicas.blend.gate import measured_on, report_path
    from mneme.replicas.engine.build import (
        build_engine,
        choose_device,
        choose_dtype,
        choose_kv_dtype,
        form_of,
        model_fingerprint,
    )
    from mneme.replicas.model.directory import load_model_config, model_directory
    from mneme.replicas.text.tokenizer import Tokenizer

    background = None if args.background is None else Background(args.background)
    before_step = (lambda: None) if background is None else background.wait
    task = None if args.task == "auto" else read_task(args.task, num_cases)
    arms = [Arm(selector, 0.0) for selector in selectors if selector == "none"]
    arms += [Arm(selector, 1.0) for selector in selectors if selector == "all"]
    arms += [Arm(each, ratio) for each in selectors if each not in ("none", "all") for ratio in ratios]
    folder = model_directory(args.model)
    model_config = load_model_config(folder)
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, device, model_config.dtype)
    named = {"device": args.device, "dtype": str(dtype).removeprefix("torch.")}
    named |= {"weights": args.weights, "kv_dtype": args.kv_dtype}
    if background is not None:  # it pauses between two steps
        named["max_batch_tokens"] = _BACKGROUND_ROWS
    config = parse(EngineConfig, named)
    out = _out_folder(args, folder)

    from rich.console import Console
    from rich.progress import Progress

    tokenizer = Tokenizer.load(folder)
    engine = build_engine(args.model, config, tokenizer=tokenizer)
    try:
        form = form_of(config.weights, engine.runner.weight_bytes)
        kv_dtype = choose_kv_dtype(config.kv_dtype, device, dtype, model_config.head_dim)
        measured = measured_on(model_fingerprint(folder, model_config, dtype, form, kv_dtype=kv_dtype))
        if task is None:
            try:
                report = measure_first(engine, tokenizer, before_step)
            except OutOfTime:
                stopped = f"it was stopped after {args.background:g} s of processor time"
                report = QualityReport(model={}, task=stopped, rows=())
            num_left_out = 0
        else:
            if out is not None and not args.force:
                _check_broader(report_path(out, measured), task)
            with Progress(console=Console(stderr=True)) as bars:
                bar = bars.add_task("cases", total=sum(map(len, task.cases_by_layout.values())))
                measured_rows, num_left_out = measure(
                    engine, tokenizer, task, arms, max_tokens=max_tokens, before_step=before_step,
                    on_progress=lambda n: bars.advance(bar, n),
                )  # fmt: skip
            report = QualityReport(model={}, task=task.name, rows=tuple(measured_rows))
    finally:
        engine.close()
        tokenizer.close()
    report, rows = replace(report, model=measured), report.rows
    path = None if out is None else report.write(out)
    if num_left_out:
        print(f"mneme quality: {num_left_out} cases are longer than the context, and left out", file=sys.stderr)
    allowed = report.allowed()
    if args.json:
        figures = {**asdict(report), "allowed": allowed, "num_left_out": num_left_out}
        print(json.dumps(figures | {"report": None if path is None else str(path)}))
    else:
        print("\n".join([*table(rows), "", _summary(allowed, rows, report.task)]))
        if path is not None:
            print(f"the report is {path}")
    return 0


def _compare_settings(args: argparse.Namespace, layout: str) -> int:
    """Compare settings of the engine on text, write the report and show it."""
    from mneme.lab.quality.comparison import (
        Comparison,
        check_broader,
        compare,
        read_setting,
        read_text,
        report_of,
        table_of,
    )
    from mneme.replicas.blend.gate import measured_on
    from mneme.replicas.engine.build import choose_device, choose_dtype, model_fingerprint
    from mneme.replicas.model.directory import load_model_config, model_directory
    from mneme.replicas.text.tokenizer import Tokenizer

    check_options(args, _OPTIONS)
    folder = model_directory(args.model)
    model_config = load_model_config(folder)
    base = {"device": args.device, "dtype": args.dtype, "weights": args.weights, "kv_dtype": args.kv_dtype}
    given = args.settings or _SETTINGS
    config_by_setting = {each: read_setting(each, base) for each in given.split(",")}
    if len(config_by_setting) < len(given.split(",")):
        raise ConfigError(f"settings: each once (got {shown(given)})")
    reference, *_ = config_by_setting.values()
    device = choose_device(reference.device)
    dtype = choose_dtype(reference.dtype, device, model_config.dtype)
    measured = measured_on(model_fingerprint(folder, model_config, dtype))
    out = _out_folder(args, folder)

    from rich.console import Console
    from rich.progress import Progress

    tokenizer = Tokenizer.load(folder)
    try:
        text = read_text(layout, tokenizer)
        if out is not None and not args.force:
            known = report_of(out, measured)
            check_broader(known, config_by_setting, text.num_scored)
        with Progress(console=Console(stderr=True)) as bars:
            bar = bars.add_task("windows", total=len(text.windows) * len(config_by_setting))
            rows, refused = compare(
                args.model,
                tokenizer,
                text,
                config_by_setting,
                skips=args.settings is None,
                on_progress=lambda: bars.advance(bar),
            )
    finally:
        tokenizer.close()
    for setting, why in refused.items():
        print(f"mneme quality: {setting} is left out: {why}", file=sys.stderr)
    if out is not None and not args.force:
        try:
            check_broader(known, [row.setting for row in rows], text.num_scored)  # without those that were left out
        except ConfigError as error:
            print(f"mneme quality: {error}", file=sys.stderr)
            out = None
    report = Comparison(model=measured, task=text.name, rows=tuple(rows))
    path = None if out is None else report.write(out)
    if args.json:
        print(json.dumps({**asdict(report), "left_out": refused, "report": None if path is None else str(path)}))
    else:
        print("\n".join(table_of(rows)))
        if path is not None:
            print(f"the report is {path}")
    return 0


def _out_folder(args: argparse.Namespace, model: Path) -> Path | None:
    """Return where the report goes; None: nowhere. Raises `ConfigError` if it cannot go there."""
    out: Path | None = args.out or (None if args.quick else model)
    if out is None:
        return None
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: {shown(str(out))} is no folder and cannot be made: {error.strerror}") from error
    if not os.access(out, os.W_OK):
        raise ConfigError(f"out: must be a folder that can be written to (got {shown(str(out))})")
    return out


def _check_broader(path: Path, task: Task) -> None:
    """Raise `ConfigError` if the report there says more than one on this task will."""
    try:
        known = QualityReport.read(path)
    except (OSError, ConfigError):
        return
    num_cases = {layout: len(cases) for layout, cases in task.cases_by_layout.items()}
    for row in known.rows:
        if row.num_cases > num_cases.get(row.layout, 0):
            raise ConfigError(
                f"out: {path} has {row.num_cases} cases of {row.layout}; --force replaces it all the same"
            )


def _summary(allowed: dict[Selector, float], rows: Sequence[Measured], task: str) -> str:
    if allowed:
        return "allowed: " + ", ".join(f"{selector} from {ratio:g}" for selector, ratio in allowed.items())
    if not rows:
        return f"nothing is allowed: {task}"
    if any(row.num_cases < MIN_CASES for row in rows):
        return f"nothing is allowed: a report needs {MIN_CASES} cases of each layout"
    if any(row.score_full < MIN_SCORE_FULL for row in rows):
        return f"nothing is allowed: full recompute itself scores less than {MIN_SCORE_FULL} on a layout"
    return "nothing is allowed: no selector is within a point of full recompute on every layout"


def table(rows: Sequence[Measured]) -> list[str]:
    """Return a line for each row under headings."""
    lines = [f"{'layout':10} {'selector':14} {'ratio':>5} {'F1':>6} {'exact':>6} {'KL':>8} {'top-1':>6}"]
    layout = None
    for row in rows:
        if row.layout != layout:
            layout = row.layout
            lines.append(f"{layout:10} {'full':14} {'':5} {row.score_full:6.3f} {row.exact_match_full:6.3f}")
        lines.append(
            f"{layout:10} {row.selector:14} {row.ratio:5g} {row.score:6.3f} {row.exact_match:6.3f} {row.kl:8.4f} "
            f"{row.top1:6.3f}"
        )
    return lines


def _ratio(given: str) -> float:
    try:
        ratio = float(given)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:  # NaN, too
        raise ConfigError(f"ratios: must be numbers from 0 to 1 (got {shown(given)})")
    return ratio


def _selector(given: str) -> Selector:
    for selector in SELECTORS:
        if selector == given:
            return selector
    raise ConfigError(f"selectors: must be of {', '.join(SELECTORS)} (got {shown(given)})")
