"""Compares settings of the engine on running text: what weights and KV of fewer bits do to a model's predictions.

The text is Python's language reference (`pydoc_data.topics`), cut into windows that are read one by one, each behind
the model's BOS alone. The first setting is the reference. Of each setting:

    perplexity  exp of the mean negative log-probability of the text's tokens
    KL, top-1   how far its distributions are from those of the reference (nats a token), and how often its most likely
                token is theirs
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mneme.config import parse, with_assignments
from mneme.errors import ConfigError, MnemeError, shown
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.build import build_engine
from mneme.replicas.engine.engine import Engine
from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.replicas.text.tokenizer import Tokenizer

FORMAT = 1
_MOST_NATS = 700.0  # of a token: more is no number any more
_PIECE = 256  # tokens of which distributions are compared at once


class Text(NamedTuple):
    """Windows of a text's tokens, and what a report calls it."""

    name: str
    windows: Sequence[Sequence[int]]

    @property
    def num_scored(self) -> int:
        return sum(len(window) - 1 for window in self.windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One setting, and how its predictions differ from those of the first."""

    setting: str
    weight_bytes: dict[str, int]  # of matrices, by what they are multiplied as
    num_tokens: int  # that were predicted
    perplexity: float
    kl: float  # nats a token, of the reference's distribution against this one's
    top1: float  # share of tokens of which the most likely is the reference's


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rows by setting, and what they were measured on."""

    model: dict[str, str]  # `mneme.replicas.blend.gate.measured_on`, of dense weights
    task: str
    rows: tuple[Compared, ...]

    def write(self, folder: Path) -> Path:
        """Write the report where `report_of` says."""
        path = report_of(folder, self.model)
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")
        return path


def report_of(folder: Path, model: Mapping[str, str]) -> Path:
    """Return where a model's report on text lies, beside that on documents."""
    return folder / f"text-{model['weights'][:12]}-{model['dtype']}-{model['rope'][:8]}.json"


def check_broader(path: Path, settings: Collection[str], num_tokens: int) -> None:
    """Raise `ConfigError` if the report there has more tokens, or settings that are not measured now."""
    try:
        known = {str(row["setting"]): int(row["num_tokens"]) for row in json.loads(path.read_text())["rows"]}
    except (OSError, ValueError, KeyError, TypeError):
        return
    for setting, found in known.items():
        if setting not in settings or found > num_tokens:
            raise ConfigError(f"out: {path} has {found} tokens of {setting}; --force replaces it all the same")


def read_text(layout: str, tokenizer: Tokenizer) -> Text:
    """Return windows x tokens of the text; raises `ConfigError` for a layout that is none, or of more than there is."""
    found = re.fullmatch(r"(\d{1,4})x(\d{1,6})", layout)
    num_windows, size = map(int, found.groups()) if found else (0, 0)
    if num_windows < 1 or size < 2:
        raise ConfigError(f"task: must be windows x tokens, such as 4x1500 (got {shown(layout)})")
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids, first = tokenizer.encode(text, add_special_tokens=False), tokenizer.sink_ids
    if num_windows * size > len(ids):
        raise ConfigError(f"task: the text has {len(ids)} tokens (got {layout})")
    windows = [[*first, *ids[start : start + size]] for start in range(0, num_windows * size, size)]
    return Text(f"text:{layout}, Python {platform.python_version()}'s language reference", windows)


def read_setting(given: str, base: Mapping[str, Any]) -> EngineConfig:
    """Return a configuration with options of the engine changed: "weights=int8", or several, joined by "+".

    Nothing is shared, so that every token of a window is computed. Raises `ConfigError`.
    """
    options = given.split("+")
    if not all("=" in each for each in options):
        raise ConfigError(f"settings: must be engine options such as weights=int8,weights=int4 (got {shown(given)})")
    return parse(EngineConfig, with_assignments({**base, "prefix_sharing": False}, options), "engine")


def compare(
    model: str,
    tokenizer: Tokenizer,
    text: Text,
    config_by_setting: Mapping[str, EngineConfig],
    *,
    skips: bool = False,
    on_progress: Callable[[], None] = lambda: None,
) -> tuple[list[Compared], dict[str, str]]:
    """Measure settings, the reference first; returns their rows, and why others were refused if `skips` allows it.

    The reference is loaded once, and reads each window again for each setting: the distributions of one window, 4 bytes
    x tokens x vocabulary, are all that is kept of it. Calls `on_progress` behind each window. Raises `MnemeError`.
    """
    (first, reference_config), *others = config_by_setting.items()
    refused = {}
    with closing(build_engine(model, reference_config, tokenizer=tokenizer)) as reference:
        rows = [_compared(first, reference, reference, text, on_progress)]
        for setting, config in others:
            try:
                engine = build_engine(model, config, tokenizer=tokenizer)
            except ConfigError as error:
                if not skips:
                    raise
                refused[setting] = str(error)
                continue
            with closing(engine):
                rows.append(_compared(setting, engine, reference, text, on_progress))
    return rows, refused


def _compared(setting: str, engine: Engine, reference: Engine, text: Text, on_progress: Callable[[], None]) -> Compared:
    loss = kl = 0.0
    num_same = 0
    for window in text.windows:
        wanted = _predictions(reference, window)
        got = wanted if engine is reference else _predictions(engine, window)
        next_ids = iter(window[1:])
        for one, other in zip(wanted, got, strict=True):
            ids = torch.tensor([next(next_ids) for _ in one])
            loss -= float(other.gather(1, ids[:, None]).double().sum())
            kl += float((one.exp() * (one - other)).where(one > -math.inf, 0.0).sum(1).double().sum())
            num_same += int((one.argmax(1) == other.argmax(1)).sum())
        on_progress()
    num_tokens = text.num_scored
    if not math.isfinite(loss) or not math.isfinite(kl):
        raise MnemeError(f"{setting}: a token of the text has no finite probability, so there is nothing to compare")
    return Compared(
        setting=setting, weight_bytes=dict(engine.runner.weight_bytes), num_tokens=num_tokens,
        perplexity=math.exp(min(loss / num_tokens, _MOST_NATS)), kl=max(kl / num_tokens, 0.0),
        top1=num_same / num_tokens,
    )  # fmt: skip


def _predictions(engine: Engine, window: Sequence[int]) -> list[Tensor]:
    """Return pieces of the log-probabilities of the tokens behind the first, float32 [tokens, vocab]."""
    pieces: list[Tensor] = []
    engine.runner.on_prompt_logits = lambda logits: pieces.append(logits.float().log_softmax(1).cpu())
    asked = GenerationRequest(
        request_id="quality", prompt_token_ids=tuple(window),
        sampling=SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), salt="quality",
    )  # fmt: skip
    engine.submit(asked)
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise MnemeError(f"a window of {len(window)} tokens: {event.error}")
    joined = torch.cat(pieces)
    assert len(joined) == len(window) - 1
    return list(torch.split(joined, _PIECE))


def table_of(rows: Sequence[Compared]) -> list[str]:
    """Return a line for each row under headings."""
    width = max(len("setting"), *(len(row.setting) for row in rows))
    lines = [f"{'setting':{width}} {'perplexity':>10} {'':>8} {'KL':>8} {'top-1':>6}  matrices"]
    for row in rows:
        change = row.perplexity / rows[0].perplexity - 1
        matrices = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sorted(row.weight_bytes.items()))
        lines.append(
            f"{row.setting:{width}} {row.perplexity:10.4f} {change:+8.2%} {row.kl:8.5f} {row.top1:6.4f}  {matrices}"
        )
    return lines
