"""What truncation that keeps KV costs in quality and saves in time, on `mneme-tiny`.

    python benchmarks/bench_truncation.py [--quick] [--only perplexity|retrieval|turns]... [--seed 0] [--out FOLDER]

AttentionStore 3.4, 4.3.4 and 4.3.7 (Tables 1 and 2, Fig. 22). The arms:
*TT*    `recompute`: the oldest go, the rest is computed anew
*ours*  `reuse_kv`: the oldest go, the KV of the rest stays and is used at its new positions
*NKVT*  naive: KV stays as it was rotated, new tokens are numbered from the truncated length, and see what came earlier

*perplexity*  of held-out text, token by token, over the tokens behind the first overflow. TT and ours run through real
              sessions of the engine (truncation_arms.py says how); NKVT, which our primitive cannot do, through the
              same decoder with dense attention (truncation_dense.py). `over TT` is the ratio of perplexities, `se` the
              standard error of its logarithm over the texts.
*retrieval*   a text and a story fill the window; a question about the story overflows it, and the answer is kept.
*turns*       a conversation goes past its window again and again: how much of what it saw before a turn it need not
              compute (hit rate), time to the first token of a turn that truncates and of the others.

`first 4` also keeps the first four tokens; `important` keeps, as half of what stays, the runs that the last tokens
attend to most. Clearly worse, for NKVT, was said to be 1.05 x TT before anything was measured; its harm grows as new
tokens come to where kept keys still say they stand, so texts must be long enough. What bounds it: query rows of one
thread in float32, one per token and text in decode, and for TT half a window of them at each truncation.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from attention.report import Check, PartResult, at_least, at_most, closing_checks, print_part, rounded, write_closing
from plots import bars, caption_of, save
from truncation_arms import Arm, Heard, Thought, load_decoder
from truncation_dense import DenseDecoder
from truncation_texts import MODEL, Question, held_out_ids, load_tokenizer, questions, streams
from workloads import cpu_name, load_average

from mneme.replicas.model.decoder import Decoder
from mneme.replicas.truncation import Truncation

PARTS = ("perplexity", "retrieval", "turns")
TT, OURS, NKVT = "TT", "ours", "NKVT"
STRATEGIES = {TT: "recompute", OURS: "reuse_kv", NKVT: "reuse_kv"}
SETTINGS: dict[str, dict[str, Any]] = {"": {}, "first 4": {"keep_first": 4}, "important": {"keep": "important"}}
MOST_OVER_TT, CLEARLY_WORSE, MOST_BELOW_TT = 1.005, 1.05, 0.01
NUM_BEFORE = 8  # tokens before the window is full from which the text is read token by token
NUM_SPARE = 4  # tokens that a story leaves of its window: any question overflows it
BATCH = 20  # sessions at once in `retrieval`
TURN_TOKENS = 64
NUM_NEW = TURN_TOKENS - 1  # of a turn; one token is the answer


class Scale(NamedTuple):
    """How much is measured."""

    windows: tuple[int, ...]
    ratios: tuple[float, ...]
    num_behind: int  # tokens of a text behind the window
    story_windows: tuple[int, ...]
    num_cases: int
    turn_windows: tuple[int, ...]
    num_turns: int


FULL = Scale((256, 512, 1024), (0.25, 0.5, 0.75), 1024, (256, 512), 400, (512, 2048), 60)
QUICK = Scale((256,), (0.5,), 512, (256,), 200, (512,), 25)


class Bench:
    """The model under both kinds of attention, and the text."""

    def __init__(self, scale: Scale, seed: int) -> None:
        self._scale, self._seed = scale, seed
        self._decoder: Decoder = load_decoder(MODEL)
        self._dense = load_decoder(MODEL, DenseDecoder)
        assert isinstance(self._dense, DenseDecoder)
        self._tokenizer = load_tokenizer()
        self._text = held_out_ids(self._tokenizer)

    def perplexity(self) -> PartResult:
        rows = []
        for window in self._scale.windows:
            texts = streams(self._text, window + self._scale.num_behind)
            for ratio in self._scale.ratios:
                rows += self._perplexity_rows(texts, window, ratio)
        ratios = {arm: [row["over TT"] for row in rows if row["arm"] == arm and not row["keeps"]] for arm in STRATEGIES}
        checks = [
            at_most("perplexity_ours_over_tt", max(ratios[OURS]), MOST_OVER_TT),
            at_least("perplexity_nkvt_over_tt", min(ratios[NKVT]), CLEARLY_WORSE),
        ]
        return PartResult(name="perplexity", title="of text behind the first overflow", rows=rows, checks=checks)

    def retrieval(self) -> PartResult:
        rows = []
        for window in self._scale.story_windows:
            asked = questions(self._tokenizer, self._text, self._scale.num_cases, window - NUM_SPARE, self._seed)
            rows += self._retrieval_rows(asked, window)
        below = [row["below TT"] for row in rows if row["arm"] == OURS and not row["keeps"]]
        check = at_most("retrieval_ours_below_tt", max(below), MOST_BELOW_TT, "accuracy")
        title = "a question behind the overflow whose answer was kept"
        return PartResult(name="retrieval", title=title, rows=rows, checks=[check])

    def turns(self) -> PartResult:
        rows = [row for window in self._scale.turn_windows for row in self._turn_rows(window)]
        title = f"conversations past their window, {TURN_TOKENS} tokens a turn"
        return PartResult(name="turns", title=title, rows=rows)

    def _perplexity_rows(self, texts: torch.Tensor, window: int, ratio: float) -> list[dict[str, Any]]:
        rows = []
        for keeps, setting in SETTINGS.items():
            means: dict[str, list[float]] = {}
            for arm in arms_of(keeps):
                truncation = Truncation(strategy=STRATEGIES[arm], ratio=ratio, **setting)  # type: ignore[arg-type]
                means[arm] = [mean_nats(own, window) for own in self._read(arm, texts, window, truncation)]
            base = means.setdefault(TT, rows[0]["_means"] if rows else [])
            for arm in arms_of(keeps):
                row = {"window": window, "ratio": ratio, "keeps": keeps, "arm": arm, "_means": means[arm]}
                rows.append(row | compared(means[arm], base) | {"tokens": len(texts) * (self._scale.num_behind - 1)})
        return [{name: value for name, value in row.items() if name != "_means"} for row in rows]

    def _read(self, arm: str, texts: torch.Tensor, window: int, truncation: Truncation) -> list[list[Thought]]:
        """What is thought of each text's tokens from `window - NUM_BEFORE` on."""
        num_prompt = window - NUM_BEFORE
        if arm == NKVT:
            self._dense.begin(len(texts), window, truncation, "naive")
            return self._dense.read(texts, num_prompt)
        prompts = {str(index): text[:num_prompt].tolist() for index, text in enumerate(texts)}
        rest = {str(index): text[num_prompt:].tolist() for index, text in enumerate(texts)}
        return [heard.thoughts for heard in Arm(self._decoder, window, truncation, len(texts)).turns(prompts, rest)]

    def _retrieval_rows(self, asked: list[Question], window: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for keeps, setting in SETTINGS.items():
            for arm in arms_of(keeps):
                truncation = Truncation(strategy=STRATEGIES[arm], **setting)  # type: ignore[arg-type]
                hits = [hit for some in batches(asked) for hit in self._answers(arm, some, window, truncation)]
                found = {"window": window, "keeps": keeps, "arm": arm, "accuracy": sum(hits) / len(hits)}
                base = rows[0]["accuracy"] if rows else found["accuracy"]
                rows.append(found | {"below TT": base - found["accuracy"], "cases": len(hits)})
        return rows

    def _answers(self, arm: str, asked: Sequence[Question], window: int, truncation: Truncation) -> list[bool]:
        """Whether each answer is the most likely token."""
        if arm == NKVT:
            self._dense.begin(len(asked), window, truncation, "naive")
            self._dense.feed(torch.tensor([each.history for each in asked]))
            chosen = self._dense.feed(torch.tensor([each.asked for each in asked])).argmax(-1).tolist()
        else:
            sessions = {str(index): each for index, each in enumerate(asked)}
            engine = Arm(self._decoder, window, truncation, len(asked))
            told = {name: each.history[:-1] for name, each in sessions.items()}
            engine.turns(told, {name: each.history[-1:] for name, each in sessions.items()})
            prompts = {name: each.asked for name, each in sessions.items()}
            heard = engine.turns(prompts, {name: [each.answer] for name, each in sessions.items()}, append=True)
            assert all(each.usage.truncated_tokens for each in heard)
            chosen = [each.thoughts[0].choice for each in heard]
        return [choice == each.answer for choice, each in zip(chosen, asked, strict=True)]

    def _turn_rows(self, window: int) -> list[dict[str, Any]]:
        kinds = {
            TT: Truncation(strategy="recompute"),
            OURS: Truncation(),
            f"{OURS}, important": Truncation(keep="important"),
        }
        engines = {name: Arm(self._decoder, window, truncation, 1) for name, truncation in kinds.items()}
        heard: dict[str, list[Heard]] = {name: [] for name in engines}
        text = self._text
        for turn in range(self._scale.num_turns):
            num_new = window - TURN_TOKENS if turn == 0 else NUM_NEW
            start = turn * TURN_TOKENS % (len(text) - window)
            own = text[start : start + num_new + 1]
            for name in engines if turn % 2 else reversed(engines):
                heard[name] += engines[name].turns({"s": own[:-1]}, {"s": own[-1:]}, append=turn > 0)
        return [{"window": window, "arm": name} | spent(own) for name, own in heard.items()]


def arms_of(keeps: str) -> tuple[str, ...]:
    """`important` chooses by KV, which TT does not keep; the naive arm is there to be beaten once."""
    return {"": (TT, OURS, NKVT), "first 4": (TT, OURS), "important": (OURS,)}[keeps]


def mean_nats(thoughts: list[Thought], window: int) -> float:
    """Over the tokens that were drawn from a truncated context."""
    return statistics.fmean(thought.nats for thought in thoughts[window + 1 - (window - NUM_BEFORE) :])


def compared(means: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Perplexity, and its ratio to the base's over the same texts."""
    differences = [own - other for own, other in zip(means, base, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return {
        "perplexity": math.exp(statistics.fmean(means)),
        "over TT": math.exp(statistics.fmean(differences)),
        "se": error,
    }


def spent(heard: Sequence[Heard]) -> dict[str, Any]:
    """Of the turns behind the first; one that dropped tokens before its answer is a truncation."""
    dropped = [each.usage.truncated_tokens for each in heard]
    is_truncation = [after > before for before, after in pairwise(dropped)]
    times = list(zip(is_truncation, (each.ttft_s * 1e3 for each in heard[1:]), strict=True))
    usages = [each.usage for each in heard[1:]]
    num_seen = sum(usage.prompt_tokens - NUM_NEW for usage in usages)
    return {
        "turns": len(usages),
        "truncations": sum(is_truncation),
        "hit rate": sum(usage.cached_tokens for usage in usages) / num_seen,
        "ttft ms": statistics.median(ms for truncated, ms in times if not truncated),
        "truncating ms": statistics.median(ms for truncated, ms in times if truncated),
    }


def batches(asked: Sequence[Question]) -> Iterator[Sequence[Question]]:
    for start in range(0, len(asked), BATCH):
        yield asked[start : start + BATCH]


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    load_before, started = load_average(), time.perf_counter()
    bench = Bench(QUICK if args.quick else FULL, args.seed)
    results = {name: getattr(bench, name)() for name in args.only or PARTS}
    checks: list[Check] = []
    for part in results.values():
        print_part(part)
        checks += part.checks
    closing = {
        "benchmark": "truncation", "device": cpu_name(), "kind": "cpu", "quick": args.quick, "seed": args.seed,
        "threads": 1, "torch": torch.__version__, "python": platform.python_version(), "dtype": "float32",
        "model": "mneme-tiny", "load_average": [load_before, load_average()],
        "elapsed_s": round(time.perf_counter() - started, 1),
        "results": {name: rounded(part.rows) for name, part in results.items()},
        **closing_checks(checks),
    }  # fmt: skip
    if args.out is not None:
        write_closing(args.out, closing)
        draw(args.out, closing)
    print(json.dumps(closing))


def draw(folder: Path, closing: dict[str, Any]) -> None:
    names = {
        TT: "rest computed anew", OURS: "mneme, KV of the rest kept",
        f"{OURS}, important": "mneme, important tokens kept", NKVT: "KV kept at its old positions",
    }  # fmt: skip
    titles = {
        "perplexity": ("Perplexity of text behind a full window (lower is better)", "perplexity", ("window", "ratio")),
        "retrieval": ("Questions answered about what a truncation kept (higher is better)", "accuracy", ("window",)),
        "turns": ("First token of a turn that truncates (lower is better)", "truncating ms", ("window",)),
    }
    for part, (title, column, group) in titles.items():
        rows = [row for row in closing["results"].get(part, ()) if not row.get("keeps")]
        if rows:
            groups = list(dict.fromkeys("\n".join(f"{row[key]:,}" for key in group) for row in rows))
            arms = [arm for arm in names if any(row["arm"] == arm for row in rows)]
            series = {names[arm]: [row[column] for row in rows if row["arm"] == arm] for arm in arms}
            x_label = "window, tokens" + ("; share of it that goes" if "ratio" in group else "")
            y_label = "milliseconds" if part == "turns" else column
            _draw_bars(folder / f"truncation_{part}.png", title, closing, groups, series, x_label, y_label)


def _draw_bars(
    path: Path, title: str, closing: dict[str, Any], groups: list[str], series: dict[str, list[float]], *labels: str
) -> None:
    save(path, title, f"mneme-tiny, {caption_of(closing)}", lambda axes: bars(axes, groups, series, *labels))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one window, one ratio, 200 questions; at most 90 s")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; may be given more than once")
    parser.add_argument("--seed", type=int, default=0, help="of the questions")
    parser.add_argument("--out", type=Path, help="folder for JSON and plots")
    return parser.parse_args()


if __name__ == "__main__":
    main()
