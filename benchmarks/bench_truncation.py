"""What truncation that keeps KV costs in quality, on `mneme-tiny`, or on a real model.

    python benchmarks/bench_truncation.py [--quick] [--out FOLDER]
    python benchmarks/bench_truncation.py --model smollm2

AttentionStore 3.4, 4.3.4 and 4.3.7 (Tables 1 and 2, Fig. 22). The arms:
*TT*    `recompute`: the oldest go, the rest is computed anew
*ours*  `reuse_kv`: the oldest go, the KV of the rest stays and is used at its new positions
*NKVT*  naive: KV stays as it was rotated, new tokens are numbered from the truncated length, and see what came earlier

Perplexity of held-out text, token by token, over the tokens behind the first overflow. TT and ours run through real
sessions of the engine (`TaughtRunner`); NKVT, which our primitive cannot do, through the same decoder with dense
attention (`DenseDecoder`). The text: documentation and docstrings of the running Python that mneme-tiny was not trained
on (training/tiny_corpus.py); nothing is downloaded. `over TT` is the ratio of perplexities, `se` the standard error of
its logarithm over the texts.

Where KV is kept the first four tokens stay, unless it says `no sinks`; `important` keeps, as half of what stays, the
runs that the last tokens attend to most. A model with sliding windows keeps no first tokens, and has TT and ours
alone. Clearly worse, for NKVT, was said to be 1.05 x TT before anything was measured; its harm grows as new tokens
come to where kept keys still say they stand, so texts must be long enough. What bounds it: query rows of one thread in
float32, one per token and text in decode, and for TT half a window of them at each truncation.
"""

from __future__ import annotations

import math
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from engines import PAGE_SIZE, request
from harness import Check, PartResult, Run, at_least, at_most, options_of
from tokenizers import Tokenizer
from torch import Tensor

from mneme.errors import MnemeError
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.forest.moves import Moves
from mneme.replicas.model.decoder import Decoder, KvPool, StepInputs
from mneme.replicas.model.directory import load_model_config, model_directory
from mneme.replicas.model.parts import Attention
from mneme.replicas.model.runner import Runner
from mneme.replicas.model.weights import load_weights
from mneme.replicas.sequence import Sequence as EngineSequence
from mneme.replicas.sequence import StepRows
from mneme.replicas.truncation import Truncation, default_for, plan_truncation

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "training"))

from tiny_corpus import library_documents  # noqa: E402

TINY = "mneme-tiny"
TT, OURS, NKVT = "TT", "ours", "NKVT"
STRATEGIES = {TT: "recompute", OURS: "reuse_kv", NKVT: "reuse_kv"}
SETTINGS: dict[str, dict[str, Any]] = {"": {}, "no sinks": {"keep_first": 0}, "important": {"keep": "important"}}
MOST_OVER_TT, CLEARLY_WORSE = 1.005, 1.05
NUM_BEFORE = 8  # tokens before the window is full from which the text is read token by token
Positions = Literal["naive", "afresh"]


class Scale(NamedTuple):
    """How much is measured."""

    windows: tuple[int, ...]
    ratios: tuple[float, ...]
    num_behind: int  # tokens of a text behind the window


FULL = Scale((256, 512, 1024), (0.25, 0.5, 0.75), 1024)
QUICK = Scale((256,), (0.5,), 512)
REAL = Scale((256, 512, 1024), (0.25, 0.5, 0.75), 512)
MOST_TEXTS = 8  # of a real model: a step of theirs reads all of its weights


class TaughtRunner(Runner):
    """Runs requests whose output is known.

    Teacher forcing is no API of the engine. This stands between the decoder and the sampler: for each row it notes what
    the model thought of the text's next token, then hands on logits that leave no other choice. All else is what serves
    requests.
    """

    def __init__(self, decoder: Decoder, num_pages: int, page_size: int) -> None:
        super().__init__(decoder, num_pages, page_size)
        self.text_by_request: dict[str, list[int]] = {}
        self.nats_by_request: dict[str, list[float]] = {}
        self._sampling: list[EngineSequence] = []

    def prepare(self, batch: list[StepRows], moves: Moves, saves: Any = (), expected: Any = None) -> StepInputs | None:
        self._sampling = [part.sequence for part in batch if part.samples]
        return super().prepare(batch, moves, saves, expected)

    def forward(self, inputs: StepInputs | None) -> torch.Tensor:
        """One-hot rows of the texts' next tokens."""
        logits = super().forward(inputs)
        names = [sequence.request.request_id for sequence in self._sampling]
        outputs = [sequence.num_output for sequence in self._sampling]
        wanted = [self.text_by_request[name][index] for name, index in zip(names, outputs, strict=True)]
        chosen = torch.tensor(wanted, dtype=torch.int64)
        for name, nats in zip(names, nats_of(logits, chosen), strict=True):
            self.nats_by_request.setdefault(name, []).append(nats)
        return torch.nn.functional.one_hot(chosen, self.vocab_size).float()


def nats_of(logits: torch.Tensor, wanted: torch.Tensor) -> list[float]:
    """What the model expected where the text has these tokens; logits float32 [S, vocab]; wanted int64 [S]."""
    found: list[float] = (-logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]).tolist()
    return found


def engine_nats(
    decoder: Decoder, texts: torch.Tensor, num_prompt: int, window: int, truncation: Truncation
) -> list[list[float]]:
    """What an engine with a window thinks of the texts behind their prompts, each an answer in a session of its own."""
    runner = TaughtRunner(decoder, 4 * len(texts) * (window // PAGE_SIZE + 2) + 8, PAGE_SIZE)
    engine = Engine(runner, None, EngineConfig(page_size=PAGE_SIZE, max_context=window))
    truncation = default_for(truncation, runner.immovable)
    for index, text in enumerate(texts.tolist()):
        runner.text_by_request[str(index)] = text[num_prompt:]
        turn = {"session_id": str(index), "truncation": truncation}
        engine.submit(request(str(index), text[:num_prompt], len(text) - num_prompt, **turn))
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise MnemeError(f"{event.request_id}: {event.error}")
    return [runner.nats_by_request[str(index)] for index in range(len(texts))]


def load_decoder(folder: Path, kind: type[Decoder] = Decoder, **options: Any) -> Decoder:
    """A model directory in float32 on the CPU."""
    config = load_model_config(folder)
    return kind(config, load_weights(folder, config, torch.device("cpu"), torch.float32), **options)


class DenseDecoder(Decoder):
    """The same forward pass with attention over plain tensors, all sequences in step; `begin` before each batch.

    `naive` is AttentionStore's NKVT (4.3.7): keys stay rotated to where their tokens once stood, and new tokens are
    numbered from the truncated length. A key is visible because it came earlier, whatever its position says: our
    primitive hides keys that stand behind a query. `afresh` rotates every key to where its token stands now: what
    `reuse_kv` does without rotating keys, so the two must agree.
    """

    def begin(self, num_sequences: int, window: int, truncation: Truncation, positions: Positions) -> None:
        config = self.config
        shape = (config.num_layers, num_sequences, window + 1, config.num_kv_heads, config.head_dim)
        self._keys, self._values = torch.zeros(shape), torch.zeros(shape)
        self._num_tokens = 0
        self._window, self._truncation, self._positions = window, truncation, positions

    def feed(self, ids: Tensor) -> Tensor:
        """Logits behind the last of these tokens, float32 [B, vocab]; room is made first if they do not fit.

        ids  int64 [B, n]
        """
        num_new = ids.shape[1]
        if self._num_tokens + num_new > self._window:
            self._truncate(num_new)
        num_rows = ids.numel()
        inputs = StepInputs(
            token_ids=ids.reshape(-1),
            positions=torch.arange(self._num_tokens, self._num_tokens + num_new),  # of one sequence: all are alike
            slots=torch.empty(0),
            sampled_rows=torch.arange(num_new - 1, num_rows, num_new),
            num_sampled=len(ids),
            plan=None,  # type: ignore[arg-type]  # nothing here has pages
        )
        logits = self.forward(inputs, None)  # type: ignore[arg-type]
        self._num_tokens += num_new
        return logits

    def read(self, ids: Tensor, num_prompt: int) -> list[list[float]]:
        """What is thought of the tokens behind the first `num_prompt` of each text; ids int64 [B, n]."""
        logits = self.feed(ids[:, :num_prompt])
        nats = [nats_of(logits, ids[:, num_prompt])]
        rest = range(num_prompt, ids.shape[1] - 1)
        nats += [nats_of(self.feed(ids[:, place : place + 1]), ids[:, place + 1]) for place in rest]
        return [list(own) for own in zip(*nats, strict=True)]

    def _truncate(self, num_new: int) -> None:
        """As the engine does it: so that one more token fits behind the new ones."""
        ranges = plan_truncation(self._num_tokens, self._window, num_new + 1, self._truncation)
        kept = torch.cat([torch.arange(start, end) for start, end in ranges])
        for cache in (self._keys, self._values):
            cache[:, :, : len(kept)] = cache[:, :, kept]
        self._num_tokens = len(kept)

    def _attend(
        self, layer: Attention, index: int, hidden: Tensor, inputs: StepInputs, pool: KvPool, spans: object
    ) -> tuple[Tensor, None, StepInputs]:
        config, places = self.config, inputs.positions
        num_new, batch = len(places), len(self._keys[index])
        heads = layer.qkv(hidden).view(batch, num_new, -1, config.head_dim)
        q, k, v = heads.split([config.num_q_heads, config.num_kv_heads, config.num_kv_heads], 2)
        if self._positions == "naive":
            k = self.ropes[index].rotate(k.contiguous(), places)
        end = self._num_tokens + num_new
        self._keys[index, :, self._num_tokens : end] = k
        self._values[index, :, self._num_tokens : end] = v
        keys = self._keys[index, :, :end]
        if self._positions == "afresh":
            keys = self.ropes[index].rotate(keys, torch.arange(end))
        came_earlier = torch.arange(end) <= places[:, None]
        out = torch.nn.functional.scaled_dot_product_attention(
            self.ropes[index].rotate(q.contiguous(), places).transpose(1, 2),
            keys.transpose(1, 2),
            self._values[index, :, :end].transpose(1, 2),
            attn_mask=came_earlier,
            enable_gqa=True,
        )
        return out.transpose(1, 2).reshape(batch * num_new, -1), None, inputs


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def held_out_ids(tokenizer: Tokenizer) -> list[int]:
    """All held-out documents in order, each behind a BOS, as in training."""
    documents = (document for document in library_documents() if document.held_out)
    return [token_id for document in documents for token_id in tokenizer.encode(document.text).ids]


def streams(ids: list[int], num_tokens: int) -> torch.Tensor:
    """Whole streams of so many tokens; int64 [streams, num_tokens]."""
    count = len(ids) // num_tokens
    return torch.tensor(ids[: count * num_tokens]).view(count, num_tokens)


class Bench:
    """The model under both kinds of attention, and the text."""

    def __init__(self, scale: Scale, model: str) -> None:
        folder = model_directory(model)
        self._scale, self._is_tiny = scale, model == TINY
        self._decoder: Decoder = load_decoder(folder)
        self._dense = load_decoder(folder, DenseDecoder)
        assert isinstance(self._dense, DenseDecoder)
        self._text = held_out_ids(load_tokenizer(folder))
        # Behind sliding windows no first tokens are kept, and nothing is chosen; and the dense decoder has none.
        self._has_windows = self._decoder.config.immovable is not None
        self._settings = {"": {}} if self._has_windows else SETTINGS

    def perplexity(self) -> PartResult:
        rows = []
        for window in self._scale.windows:
            texts = streams(self._text, window + self._scale.num_behind)[: None if self._is_tiny else MOST_TEXTS]
            for ratio in self._scale.ratios:
                rows += self._perplexity_rows(texts, window, ratio)
        ratios = {arm: [row["over TT"] for row in rows if row["arm"] == arm and not row["keeps"]] for arm in STRATEGIES}
        checks = checks_of(max(ratios[OURS]), min(ratios[NKVT], default=None))
        return PartResult(name="perplexity", title="of text behind the first overflow", rows=rows, checks=checks)

    def _perplexity_rows(self, texts: torch.Tensor, window: int, ratio: float) -> list[dict[str, Any]]:
        rows = []
        for keeps, setting in self._settings.items():
            arms = [arm for arm in arms_of(keeps) if arm != NKVT or not self._has_windows]
            means: dict[str, list[float]] = {}
            for arm in arms:
                truncation = Truncation(strategy=STRATEGIES[arm], ratio=ratio, **setting)  # type: ignore[arg-type]
                means[arm] = [mean_nats(own) for own in self._read(arm, texts, window, truncation)]
            base = means.setdefault(TT, rows[0]["_means"] if rows else [])
            for arm in arms:
                row = {"window": window, "ratio": ratio, "keeps": keeps, "arm": arm, "_means": means[arm]}
                rows.append(row | compared(means[arm], base) | {"tokens": len(texts) * (self._scale.num_behind - 1)})
        return [{name: value for name, value in row.items() if name != "_means"} for row in rows]

    def _read(self, arm: str, texts: torch.Tensor, window: int, truncation: Truncation) -> list[list[float]]:
        """What is thought of each text's tokens from `window - NUM_BEFORE` on."""
        num_prompt = window - NUM_BEFORE
        if arm == NKVT:
            self._dense.begin(len(texts), window, truncation, "naive")
            return self._dense.read(texts, num_prompt)
        return engine_nats(self._decoder, texts, num_prompt, window, truncation)


def arms_of(keeps: str) -> tuple[str, ...]:
    """`important` chooses by KV, which TT does not keep; the naive arm is there to be beaten once."""
    return {"": (TT, OURS, NKVT), "no sinks": (OURS,), "important": (OURS,)}[keeps]


def mean_nats(nats: Sequence[float]) -> float:
    """Over the tokens that were drawn from a truncated context."""
    return statistics.fmean(nats[NUM_BEFORE + 1 :])


def compared(means: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Perplexity, and its ratio to the base's over the same texts."""
    differences = [own - other for own, other in zip(means, base, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return {
        "perplexity": math.exp(statistics.fmean(means)),
        "over TT": math.exp(statistics.fmean(differences)),
        "se": error,
    }


def checks_of(ours: float, nkvt: float | None) -> list[Check]:
    return [
        at_most("perplexity_ours_over_tt", ours, MOST_OVER_TT),
        at_least("perplexity_nkvt_over_tt", nkvt, CLEARLY_WORSE),
    ]


def main() -> None:
    parser = options_of(__doc__, quick="one window, one ratio; at most 90 s", seed=False, out=True)
    parser.add_argument("--model", default=TINY)
    args = parser.parse_args()
    run = Run("truncation", args, threads=1, python=platform.python_version(), dtype="float32", model=args.model)
    is_tiny = args.model == TINY
    bench = Bench(QUICK if args.quick else FULL if is_tiny else REAL, args.model)
    run.end({"perplexity": run.show(bench.perplexity()).rows})


if __name__ == "__main__":
    main()
