"""What truncation that keeps KV costs in quality: AttentionStore Tables 1 and 2 (4.3.7).

*TT*    `recompute`: the oldest go, the rest is computed anew
*ours*  `reuse_kv`: the oldest go, the KV of the rest stays and is used at its new positions
*NKVT*  naive: KV stays as it was rotated, new tokens are numbered from the truncated length, and see what came earlier

Table 1: perplexity of held-out text, token by token, behind the first overflow. TT and ours run through real sessions
of the engine (`TaughtRunner`); NKVT, which our primitive cannot do, through the same decoder with dense attention
(`DenseDecoder`). The text: documentation and docstrings of the running Python that mneme-tiny was not trained on
(training/tiny_corpus.py). `over TT` is the ratio of perplexities, `se` the standard error of its logarithm.
Table 2: a question about a code in a passage, asked when a long text has filled the window; right is who would say all
tokens of the code. It stands for MMLU, LongEval and PIQA, which a model of this size cannot do.

Where KV is kept the first four tokens stay, unless it says `no sinks`; `important` keeps, as half of what stays, the
runs that the last tokens attend to most. What bounds it: query rows of one thread in float32, one per token and text,
and for TT half a window of them at each truncation.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from random_models import PAGE_SIZE, request
from tokenizers import Tokenizer
from torch import Tensor

from mneme.errors import MnemeError
from mneme.lab.quality.retrieval import hidden_codes
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
from papers.experiment import Experiment, Found, Ours, Point, percent, spread

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "training"))

from tiny_corpus import library_documents  # noqa: E402

TT, OURS, NKVT = "TT", "ours", "NKVT"
STRATEGIES = {TT: "recompute", OURS: "reuse_kv", NKVT: "reuse_kv"}
SETTINGS: dict[str, dict[str, Any]] = {"": {}, "no sinks": {"keep_first": 0}, "important": {"keep": "important"}}
NUM_BEFORE = 8  # tokens before the window is full from which the text is read token by token
Positions = Literal["naive", "afresh"]


class Thought(NamedTuple):
    """What a model thought of a text's next token."""

    nats: float
    is_best: bool


class TaughtRunner(Runner):
    """Runs requests whose output is known.

    Teacher forcing is no API of the engine. This stands between the decoder and the sampler: for each row it notes what
    the model thought of the text's next token, then hands on logits that leave no other choice. All else is what serves
    requests.
    """

    def __init__(self, decoder: Decoder, num_pages: int, page_size: int) -> None:
        super().__init__(decoder, num_pages, page_size)
        self.text_by_request: dict[str, list[int]] = {}
        self.thoughts_by_request: dict[str, list[Thought]] = {}
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
        for name, thought in zip(names, thoughts_of(logits, chosen), strict=True):
            self.thoughts_by_request.setdefault(name, []).append(thought)
        return torch.nn.functional.one_hot(chosen, self.vocab_size).float()


def thoughts_of(logits: torch.Tensor, wanted: torch.Tensor) -> list[Thought]:
    """What the model thought where the text has these tokens; logits float32 [S, vocab]; wanted int64 [S]."""
    nats = -logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    return [Thought(*each) for each in zip(nats.tolist(), (logits.argmax(-1) == wanted).tolist(), strict=True)]


def engine_thoughts(
    decoder: Decoder, texts: torch.Tensor, num_prompt: int, window: int, truncation: Truncation
) -> list[list[Thought]]:
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
    return [runner.thoughts_by_request[str(index)] for index in range(len(texts))]


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

    def _is_native(self, _inputs: object) -> bool:
        return False  # attention is ours

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

    def read(self, ids: Tensor, num_prompt: int) -> list[list[Thought]]:
        """What is thought of the tokens behind the first `num_prompt` of each text; ids int64 [B, n]."""
        logits = self.feed(ids[:, :num_prompt])
        thoughts = [thoughts_of(logits, ids[:, num_prompt])]
        rest = range(num_prompt, ids.shape[1] - 1)
        thoughts += [thoughts_of(self.feed(ids[:, place : place + 1]), ids[:, place + 1]) for place in rest]
        return [list(own) for own in zip(*thoughts, strict=True)]

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


class Models(Experiment):
    """Points of a model, which is loaded under both kinds of attention."""

    model, is_timed = "smollm2 and mneme-tiny", False

    def open(self, stack: ExitStack) -> None:
        torch.set_num_threads(1)
        self._loaded: dict[str, tuple[Decoder, DenseDecoder, Tokenizer]] = {}

    def loaded(self, of: str) -> tuple[Decoder, DenseDecoder, Tokenizer]:
        if of not in self._loaded:
            folder = model_directory(of)
            dense = load_decoder(folder, DenseDecoder)
            assert isinstance(dense, DenseDecoder)
            self._loaded[of] = load_decoder(folder), dense, load_tokenizer(folder)
        return self._loaded[of]

    def read(self, of: str, arm: str, texts: Tensor, window: int, truncation: Truncation) -> list[list[Thought]]:
        """What is thought of each text's tokens from `window - NUM_BEFORE` on."""
        decoder, dense, _ = self.loaded(of)
        num_prompt = window - NUM_BEFORE
        if arm == NKVT:
            dense.begin(len(texts), window, truncation, "naive")
            return dense.read(texts, num_prompt)
        return engine_thoughts(decoder, texts, num_prompt, window, truncation)


class Perplexity(Models):
    """Table 1, over windows and shares that go."""

    name, title, minutes = "attention-store-perplexity", "AttentionStore Table 1: perplexity behind a full window", 45
    rows = ("A28",)

    def points(self) -> Iterable[Point]:
        models = ("mneme-tiny",) if self.is_quick else ("smollm2", "mneme-tiny")
        windows, ratios = ((256,), (0.5,)) if self.is_quick else ((256, 512, 1024), (0.25, 0.5, 0.75))
        return [{"of": of, "window": window, "ratio": ratio} for of in models for window in windows for ratio in ratios]

    def measure(self, point: Point) -> Point:
        num_behind = 128 if self.is_quick else 512 if point["of"] == "smollm2" else 1024
        text = held_out_ids(self.loaded(point["of"])[2])
        texts = streams(text, point["window"] + num_behind)[: 2 if self.is_quick else 8]
        found: Point = {"tokens": len(texts) * (num_behind - 1)}
        base: list[float] = []
        for keeps, setting in SETTINGS.items():
            for arm in arms_of(keeps):
                truncation = Truncation(strategy=STRATEGIES[arm], ratio=point["ratio"], **setting)  # type: ignore[arg-type]
                read = self.read(point["of"], arm, texts, point["window"], truncation)
                means = [statistics.fmean(each.nats for each in own[NUM_BEFORE + 1 :]) for own in read]
                base = base or means
                name = f"{arm} {keeps}".strip()
                found |= {f"{name} {figure}": value for figure, value in compared(means, base).items()}
        return found

    def ours(self, found: Found) -> dict[str, Ours]:
        told = []
        for of in ("smollm2", "mneme-tiny"):
            over = {arm: spread((row[f"{arm} over TT"] for row in found if row["of"] == of), "{:.3f}x".format)
                    for arm in (OURS, NKVT)}  # fmt: skip
            told.append(f"{of} {over[OURS]} of recomputing, coupled {over[NKVT]}")
        return {
            "A28": Ours("; ".join(told), note="windows of 256, 512 and 1,024; 0.25, 0.5 and 0.75 go; four sinks stay")
        }


class Questions(Models):
    """Table 2: questions behind a full window."""

    name, title, minutes = "attention-store-questions", "AttentionStore Table 2: questions behind a full window", 30
    rows = ("A29",)
    num_behind = 224  # tokens behind the window: a passage's, the question's and the answer's, and text before them

    def points(self) -> Iterable[Point]:
        windows = (256,) if self.is_quick else (512, 1024)
        return [{"of": "mneme-tiny" if self.is_quick else "smollm2", "window": window} for window in windows]

    def measure(self, point: Point) -> Point:
        _, _, tokenizer = self.loaded(point["of"])
        length = point["window"] + self.num_behind
        text, texts, sizes = held_out_ids(tokenizer), list[list[int]](), list[int]()
        for index, case in enumerate(
            hidden_codes(self.seed, num_cases=2 if self.is_quick else 64, num_passages=2, num_words=30)
        ):
            asked = "\n\n" + "\n\n".join(case.passages) + f"\n\nThe code of the {case.place} is"
            prompt = tokenizer.encode(asked, add_special_tokens=False).ids
            whole = tokenizer.encode(f"{asked} {case.code}", add_special_tokens=False).ids
            begin = 97 * index
            texts.append(text[begin : begin + length - len(whole)] + whole)
            sizes.append(len(whole) - len(prompt))
        found: Point = {"cases": len(texts)}
        for arm, strategy in STRATEGIES.items():
            truncation = Truncation(strategy=strategy)  # type: ignore[arg-type]
            read = self.read(point["of"], arm, torch.tensor(texts), point["window"], truncation)
            right = [all(each.is_best for each in own[-size:]) for own, size in zip(read, sizes, strict=True)]
            found[f"{arm} right"] = statistics.fmean(right)
        return found

    def ours(self, found: Found) -> dict[str, Ours]:
        told = [f"{row['window']:,}: {' / '.join(percent(row[f'{arm} right']) for arm in STRATEGIES)}" for row in found]
        note = f"right with TT / ours / coupled, {found[0]['cases']} questions a window; SmolLM2; not its benchmarks"
        return {"A29": Ours("; ".join(told), False, note)}


def arms_of(keeps: str) -> tuple[str, ...]:
    """`important` chooses by KV, which TT does not keep; the naive arm is there to be beaten once."""
    return {"": (TT, OURS, NKVT), "no sinks": (OURS,), "important": (OURS,)}[keeps]


def compared(means: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Perplexity, and its ratio to the base's over the same texts."""
    differences = [own - other for own, other in zip(means, base, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return {
        "perplexity": math.exp(statistics.fmean(means)),
        "over TT": math.exp(statistics.fmean(differences)),
        "se": error,
    }


EXPERIMENTS = (Perplexity, Questions)
