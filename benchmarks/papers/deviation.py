"""How far the KV of documents computed alone is from the whole prompt's: CacheBlend Fig. 6 to 8.

Dense attention of `transformers` in float32, no engine: what selectors are after, apart from how ours does it. A point
is a prompt: mneme-tiny's cross-chunk task with 8 documents of 4 sentences, and for SmolLM2 8 passages of 30 words of
real text with codes in them. Keys are compared before rotation.

deviation    of a token in a layer: the L2 norm of (its key and value behind the whole prompt) - (alone), over that of
             the former; what share of the sum the first 15% of the tokens hold (Fig. 7)
correlation  Spearman's of the tokens' deviations in one layer and the next (Fig. 8)
attention    the L2 distance of the question's attention, in share of its norm, from that of full recompute, mean over
             layers, when some share of document tokens is recomputed and the rest reused (Fig. 6): those farthest off
             in the second layer (`hkvd`), random ones, the first of each document
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from bench_real_model import reference
from plots import Points
from torch import Tensor

from mneme.lab.quality.tasks import Case, Task, read_task
from mneme.replicas.model.directory import model_directory
from mneme.replicas.text.document_parts import encode_parts, prompt_parts
from mneme.replicas.text.tokenizer import Tokenizer
from papers.experiment import Experiment, Found, Ours, Point, percent, spread

TASKS = {"mneme-tiny": "coreference:8x4", "smollm2": "retrieval:8x30"}
NUM_PROMPTS = {"mneme-tiny": 32, "smollm2": 4}
RATIOS = (0.0, 0.05, 0.15, 0.3, 0.5)


class Seen(NamedTuple):
    """What a forward pass computed; keys come before values, before rotation."""

    kv: list[Tensor]  # of each layer [n, 2 * num_kv_heads * head_dim]
    attention: list[Tensor]  # of each layer [heads, question rows, n]


class Model:
    """A Llama-like model whose keys and values of some positions can be replaced."""

    def __init__(self, name: str) -> None:
        self._model = reference(model_directory(name))
        self._model.set_attn_implementation("eager")
        self.tokenizer = Tokenizer.load(model_directory(name))

    @torch.inference_mode()
    def run(self, ids: Sequence[int], num_rows: int = 1, kept: Sequence[Tensor] = (), at: Tensor | None = None) -> Seen:
        """Compute a prompt. At the positions `at` each layer's keys and values are those of `kept`, not its own."""
        layers, found = self._model.model.layers, [dict[str, Tensor]() for _ in self._model.model.layers]

        def hook(index: int, name: str) -> Callable[[Any, Any, Tensor], Tensor]:
            def note(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
                output = output.clone()
                if at is not None:
                    half = kept[index].shape[1] // 2
                    output[0, at] = kept[index][at, :half] if name == "k_proj" else kept[index][at, half:]
                found[index][name] = output[0]
                return output

            return note

        with ExitStack() as hooks:
            for index, layer in enumerate(layers):
                for name in ("k_proj", "v_proj"):
                    hooks.callback(getattr(layer.self_attn, name).register_forward_hook(hook(index, name)).remove)
            out = self._model(torch.tensor([ids]), output_attentions=True, use_cache=False)
        return Seen(
            [torch.cat([each["k_proj"], each["v_proj"]], 1) for each in found],
            [layer[0, :, -num_rows:] for layer in out.attentions],
        )


def spearman(one: Tensor, other: Tensor) -> float:
    """Correlate the ranks of two vectors."""
    return float(torch.corrcoef(torch.stack([each.argsort().argsort().double() for each in (one, other)]))[0, 1])


class Deviation(Experiment):
    name, title, minutes = "cache-blend-deviation", "CacheBlend Fig. 6 to 8: how far documents' KV is off", 15
    rows = ("B14", "B15", "B16")
    axes = ("share computed anew", "L2 distance")
    model, is_timed = "mneme-tiny and smollm2", False

    def points(self) -> Iterable[Point]:
        counts = {"mneme-tiny": 1} if self.is_quick else NUM_PROMPTS
        return [{"of": of, "prompt": number} for of, count in counts.items() for number in range(count)]

    def open(self, stack: ExitStack) -> None:
        torch.set_num_threads(1)
        self._loaded: dict[str, tuple[Model, Task, Sequence[Case]]] = {}

    def measure(self, point: Point) -> Point:
        if point["of"] not in self._loaded:
            task = read_task(TASKS[point["of"]], NUM_PROMPTS[point["of"]])
            (cases,) = task.cases_by_layout.values()
            self._loaded[point["of"]] = Model(point["of"]), task, cases
        model, task, cases = self._loaded[point["of"]]
        parts = prompt_parts(task.parts(cases[point["prompt"]]), ())
        prompt = encode_parts(model.tokenizer, parts, add_special_tokens=True)
        ids, spans = prompt.token_ids, prompt.documents
        num_rows = len(ids) - spans[-1].end
        full = model.run(ids, num_rows)
        alone = [layer.clone() for layer in full.kv]
        sinks = list(model.tokenizer.sink_ids)
        for span in spans[1:]:  # the first stands behind nothing but the sinks: it is exact
            cached = model.run([*sinks, *ids[span.start : span.end]])
            for layer, theirs in zip(alone, cached.kv, strict=True):
                layer[span.start : span.end] = theirs[len(sinks) :]
        places = torch.cat([torch.arange(span.start, span.end) for span in spans[1:]])
        off = torch.stack([(ours[places] - theirs[places]).norm(dim=1) / ours[places].norm(dim=1)
                           for ours, theirs in zip(full.kv, alone, strict=True)])  # fmt: skip
        top = max(round(0.15 * len(places)), 1)
        shares = [float(layer.topk(top).values.sum() / layer.sum()) for layer in off[1:]]
        neighbours = [spearman(one, other) for one, other in itertools.pairwise(off[1:])]
        shuffled = random.Random(self.seed + point["prompt"]).sample(range(len(places)), len(places))
        depth = torch.cat([torch.arange(span.end - span.start) / (span.end - span.start) for span in spans[1:]])
        orders = {"hkvd": off[1].argsort(descending=True), "random": torch.tensor(shuffled), "first-k": depth.argsort()}
        far: Point = {}
        for name, order in orders.items():
            for ratio in RATIOS:
                seen = model.run(ids, num_rows, alone, places[order[round(ratio * len(places)) :]])
                pairs = zip(seen.attention, full.attention, strict=True)
                far[f"{name} {ratio:g}"] = statistics.fmean(float((a - b).norm() / b.norm()) for a, b in pairs)
        return {**far, "top share, layer 2": shares[0], "top share": statistics.fmean(shares),
                "rank correlation": statistics.fmean(neighbours), "least correlation": min(neighbours)}  # fmt: skip

    def ours(self, found: Found) -> dict[str, Ours]:
        def mean(of: str, figure: str) -> float:
            return statistics.fmean(row[figure] for row in found if row["of"] == of)

        falls, holds = list[str](), list[str]()
        for of in TASKS:
            less = [
                f"{name} {mean(of, f'{name} 0.15') / mean(of, f'{name} 0') - 1:+.0%}" for name in ("hkvd", "random")
            ]
            falls.append(f"{of} {', '.join(less)}")
            holds.append(
                f"{of} {percent(mean(of, 'top share, layer 2'))} in layer 2, {percent(mean(of, 'top share'))} in all"
            )
        correlations = spread((mean(of, "rank correlation") for of in TASKS), "{:.2f}".format)
        least = min(row["least correlation"] for row in found)
        note = f"{NUM_PROMPTS['mneme-tiny']} prompts of mneme-tiny, {NUM_PROMPTS['smollm2']} of SmolLM2"
        return {
            "B14": Ours(f"attention's deviation at 15%: {'; '.join(falls)}", note=note),
            "B15": Ours(f"15% of the tokens hold {'; '.join(holds)}", note=note),
            "B16": Ours(f"{correlations} on average, at least {least:.2f}", note=note),
        }

    def series(self, found: Found) -> Mapping[str, Points]:
        rows = [row for row in found if row["of"] == "smollm2"]
        return {("mneme, hkvd" if name == "hkvd" else name): [
            (ratio, statistics.fmean(row[f"{name} {ratio:g}"] for row in rows)) for ratio in RATIOS]
            for name in ("hkvd", "random", "first-k")} if rows else {}  # fmt: skip


EXPERIMENTS = (Deviation,)
