"""How far the KV of documents computed alone is from the whole prompt's, on mneme-tiny (CacheBlend 4.2, Fig. 6-8).

    python benchmarks/bench_kv_deviation.py [--quick] [--seed 0] [--out FOLDER]

Dense attention of `transformers` in float32, no engine: what selectors are after, apart from how ours does it. Prompts
are the cross-chunk task's with 8 documents of 4 sentences. Keys are compared before rotation.

deviation    of a token in a layer: the L2 norm of (its key and value behind the whole prompt) - (alone), over that of
             the former; quantiles over all document tokens (Fig. 7)
correlation  Spearman's of the tokens' deviations in one layer and the next (Fig. 8): tokens that are far off in one
             layer are in the next
attention    the L2 distance of the question's attention, in share of its norm, from that of full recompute, mean over
             layers, when the KV of some share of document tokens is recomputed and the rest reused (Fig. 6): those
             farthest off in the second layer (`hkvd`), random ones, the first of each document
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import Check, PartResult, Run, at_least, options_of
from plots import caption_of, lines, save
from torch import Tensor

from mneme.lab.quality.tasks import read_task
from mneme.replicas.model.config import model_directory
from mneme.replicas.text.parts import EncodedPrompt, encode_parts, prompt_parts
from mneme.replicas.text.tokenizer import Tokenizer

LAYOUT = "8x4"
RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)


class Seen(NamedTuple):
    """What a forward pass computed; keys come before values, before rotation."""

    kv: list[Tensor]  # of each layer [n, 2 * num_kv_heads * head_dim]
    attention: list[Tensor]  # of each layer [heads, question rows, n]


class Model:
    """A Llama-like model whose keys and values of some positions can be replaced."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            model_directory("mneme-tiny"), dtype=torch.float32, attn_implementation="eager"
        ).eval()

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


class Measured(NamedTuple):
    """One prompt's figures."""

    deviations: Tensor  # [layers, document tokens]
    attention: dict[str, list[float]]  # by who chooses, a value for each ratio


def measure(model: Model, prompt: EncodedPrompt, bos: Sequence[int], seed: int) -> Measured:
    num_rows = len(prompt.token_ids) - prompt.documents[-1].end
    full = model.run(prompt.token_ids, num_rows)
    reused = prompt.documents[1:]  # the first stands behind nothing but the BOS: it is exact
    alone = [layer.clone() for layer in full.kv]
    for span in reused:
        cached = model.run([*bos, *prompt.token_ids[span.start : span.end]])
        for layer, theirs in zip(alone, cached.kv, strict=True):
            layer[span.start : span.end] = theirs[len(bos) :]
    places = torch.cat([torch.arange(span.start, span.end) for span in reused])
    off = torch.stack(
        [
            (ours[places] - theirs[places]).norm(dim=1) / ours[places].norm(dim=1)
            for ours, theirs in zip(full.kv, alone, strict=True)
        ]
    )
    shuffled = random.Random(seed).sample(range(len(places)), len(places))
    depth = torch.cat([torch.arange(span.end - span.start) / (span.end - span.start) for span in reused])
    ranked = {"hkvd": off[1].argsort(descending=True), "random": torch.tensor(shuffled), "first-k": depth.argsort()}
    attention = {}
    for name, order in ranked.items():
        attention[name] = []
        for ratio in RATIOS:
            rest = places[order[round(ratio * len(places)) :]]
            seen = model.run(prompt.token_ids, num_rows, alone, rest)
            far = [
                float((ours - theirs).norm() / theirs.norm())
                for ours, theirs in zip(seen.attention, full.attention, strict=True)
            ]
            attention[name].append(sum(far) / len(far))
    return Measured(off, attention)


def spearman(one: Tensor, other: Tensor) -> float:
    """Correlate the ranks of two vectors."""
    return float(torch.corrcoef(torch.stack([each.argsort().argsort().double() for each in (one, other)]))[0, 1])


def parts_of(found: Sequence[Measured]) -> list[PartResult]:
    num_layers = len(found[0].deviations)
    pooled = [torch.cat([each.deviations[layer] for each in found]) for layer in range(num_layers)]
    top = round(0.15 * len(pooled[0]))
    deviation = [
        {"layer": layer} | {f"{q:.0%}": float(pooled[layer].quantile(q)) for q in QUANTILES}
        | {"share of the top 15%": float(pooled[layer].topk(top).values.sum() / pooled[layer].sum())}
        for layer in range(1, num_layers)
    ]  # fmt: skip
    correlation = [
        {"layers": f"{layer}, {layer + 1}", "rank correlation": spearman(pooled[layer], pooled[layer + 1])}
        for layer in range(1, num_layers - 1)
    ]
    attention = [
        {"recomputed": ratio}
        | {name: sum(each.attention[name][at] for each in found) / len(found) for name in found[0].attention}
        for at, ratio in enumerate(RATIOS)
    ]
    nearer = min(row["random"] / row["hkvd"] for row in attention if 0 < row["recomputed"] < 1)
    checks: list[Check] = [
        at_least("rank_correlation", min(row["rank correlation"] for row in correlation), 0.5, "Spearman"),
        at_least("hkvd_nearer_than_random_at_every_share", nearer, 1.0),
    ]
    return [
        PartResult(name="deviation", title="how far a document token's KV is off, quantiles (layer 0 is exact)",
                   rows=deviation),
        PartResult(name="correlation", title="of tokens' deviations in neighbouring layers", rows=correlation),
        PartResult(name="attention", title="how far the question's attention is off", rows=attention, checks=checks),
    ]  # fmt: skip


def main() -> None:
    args = options_of(__doc__, quick="4 prompts, not 32", out=True).parse_args()
    run = Run("kv_deviation", args, threads=1, dtype="float32", model="mneme-tiny", layout=LAYOUT)
    tokenizer, model = Tokenizer.load(model_directory("mneme-tiny")), Model()
    task = read_task(f"coreference:{LAYOUT}", 4 if args.quick else 32)
    found = [
        measure(model, encode_parts(tokenizer, prompt_parts(task.parts(case), ()), add_special_tokens=True),
                tokenizer.sink_ids, args.seed + index)
        for index, case in enumerate(task.cases_by_layout[LAYOUT])
    ]  # fmt: skip
    tokenizer.close()
    results = {}
    for part in parts_of(found):
        results[part.name] = run.show(part).rows
    run.end(results, draw)


def draw(folder: Path, closing: dict[str, Any]) -> None:
    """The three figures side by side."""
    results = closing["results"]
    quantiles = {f"layer {row['layer']}": [(row[f"{q:.0%}"], q) for q in QUANTILES] for row in results["deviation"]}
    correlation = {"": [(int(row["layers"].split(",")[0]), row["rank correlation"]) for row in results["correlation"]]}
    attention = {
        name: [(row["recomputed"], row[name]) for row in results["attention"]] for name in ("hkvd", "random", "first-k")
    }
    for name, title, panel in (
        ("deviation", "How far document tokens' KV is off in each layer (further left is better)",
         lambda axes: lines(axes, quantiles, "deviation, in share of the norm", "share of tokens below")),
        ("correlation", "Whether tokens that are far off in one layer are in the next (1: the same ones)",
         lambda axes: lines(axes, correlation, "layer, with the next", "rank correlation")),
        ("attention", "How far the question's attention is from full recompute's (lower is better)",
         lambda axes: lines(axes, attention, "share of document tokens recomputed", "distance, in share of the norm")),
    ):  # fmt: skip
        save(folder / f"kv_{name}.png", title, f"mneme-tiny, 8 documents of 4 sentences, {caption_of(closing)}", panel)


if __name__ == "__main__":
    main()
