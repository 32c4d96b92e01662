"""What truncation that keeps KV costs in quality and saves in time, on `mneme-tiny`, or on a real model.

    python benchmarks/bench_truncation.py [--quick] [--only perplexity|retrieval|turns]... [--seed 0] [--out FOLDER]
    python benchmarks/bench_truncation.py --model smollm2  # perplexity alone

AttentionStore 3.4, 4.3.4 and 4.3.7 (Tables 1 and 2, Fig. 22). The arms:
*TT*    `recompute`: the oldest go, the rest is computed anew
*ours*  `reuse_kv`: the oldest go, the KV of the rest stays and is used at its new positions
*NKVT*  naive: KV stays as it was rotated, new tokens are numbered from the truncated length, and see what came earlier

*perplexity*  of held-out text, token by token, over the tokens behind the first overflow. TT and ours run through real
              sessions of the engine (`TaughtRunner`); NKVT, which our primitive cannot do, through the same decoder
              with dense attention (`DenseDecoder`). The text: documentation and docstrings of the running Python that
              mneme-tiny was not trained on (training/tiny_corpus.py); nothing is downloaded. `over TT` is the ratio
              of perplexities, `se` the standard error of its logarithm over the texts.
*retrieval*   a text and a story fill the window; a question about the story overflows it, and the answer is kept.
*turns*       a conversation goes past its window again and again: how much of what it saw before a turn it need not
              compute (hit rate), time to the first token of a turn that truncates and of the others.

Where KV is kept the first four tokens stay, unless it says `no sinks`; `important` keeps, as half of what stays, the
runs that the last tokens attend to most. A model with sliding windows keeps no first tokens, and has TT and ours
alone. Clearly worse, for NKVT, was said to be 1.05 x TT before anything was measured; its harm grows as new tokens
come to where kept keys still say they stand, so texts must be long enough. What bounds it: query rows of one thread in
float32, one per token and text in decode, and for TT half a window of them at each truncation.
"""

from __future__ import annotations

import math
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from engines import PAGE_SIZE, request
from harness import Check, PartResult, Run, at_least, at_most, options_of
from tokenizers import Tokenizer
from torch import Tensor

from mneme.errors import MnemeError
from mneme.lab.quality.coreference import px_cases
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.forest.moves import Moves
from mneme.replicas.model.config import load_model_config, model_directory
from mneme.replicas.model.decoder import Decoder, KvPool, StepInputs
from mneme.replicas.model.parts import Attention
from mneme.replicas.model.runner import Runner
from mneme.replicas.model.weights import load_weights
from mneme.replicas.request import PromptUsage
from mneme.replicas.sequence import Sequence as EngineSequence
from mneme.replicas.sequence import StepRows
from mneme.replicas.truncation import Truncation, default_for, plan_truncation

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "training"))

from tiny_checks import encode_ids  # noqa: E402
from tiny_corpus import library_documents  # noqa: E402

PARTS = ("perplexity", "retrieval", "turns")
TINY = "mneme-tiny"
TT, OURS, NKVT = "TT", "ours", "NKVT"
STRATEGIES = {TT: "recompute", OURS: "reuse_kv", NKVT: "reuse_kv"}
SETTINGS: dict[str, dict[str, Any]] = {"": {}, "no sinks": {"keep_first": 0}, "important": {"keep": "important"}}
MOST_OVER_TT, CLEARLY_WORSE, MOST_BELOW_TT = 1.005, 1.05, 0.01
NUM_BEFORE = 8  # tokens before the window is full from which the text is read token by token
NUM_SPARE = 4  # tokens that a story leaves of its window: any question overflows it
BATCH = 20  # sessions at once in `retrieval`
TURN_TOKENS = 64
NUM_NEW = TURN_TOKENS - 1  # of a turn; one token is the answer
NUM_CHUNKS, NUM_SENTENCES = 8, 4  # of a case: the card's main layout, 0.995 with full attention
Positions = Literal["naive", "afresh"]


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
REAL = Scale((256, 512, 1024), (0.25, 0.5, 0.75), 512, (), 0, (), 0)
MOST_TEXTS = 8  # of a real model: a step of theirs reads all of its weights


class Thought(NamedTuple):
    """What the model expected where the text has a token."""

    nats: float  # of that token
    choice: int  # the most likely one


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
        thoughts = thoughts_of(logits, chosen)
        for name, thought in zip(names, thoughts, strict=True):
            self.thoughts_by_request.setdefault(name, []).append(thought)
        return torch.nn.functional.one_hot(chosen, self.vocab_size).float()


def thoughts_of(logits: torch.Tensor, wanted: torch.Tensor) -> list[Thought]:
    """logits float32 [S, vocab]; wanted int64 [S]."""
    nats = -logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    return [Thought(*pair) for pair in zip(nats.tolist(), logits.argmax(-1).tolist(), strict=True)]


class Heard(NamedTuple):
    """What one turn heard."""

    thoughts: list[Thought]  # of its output
    usage: PromptUsage
    ttft_s: float


class Arm:
    """An engine with a window, over the weights of mneme-tiny in float32, and one way to truncate."""

    def __init__(self, decoder: Decoder, window: int, truncation: Truncation, num_sessions: int) -> None:
        num_pages = 4 * num_sessions * (window // PAGE_SIZE + 2) + 8
        self._runner = TaughtRunner(decoder, num_pages, PAGE_SIZE)
        self._engine = Engine(self._runner, None, EngineConfig(page_size=PAGE_SIZE, max_context=window))
        self._truncation = default_for(truncation, self._runner.immovable)
        self._num_requests = 0

    def turns(self, prompts: dict[str, list[int]], texts: dict[str, list[int]], *, append: bool = False) -> list[Heard]:
        """A turn of each session, all at once; the answers are the texts.

        prompts  token ids by session; with `append` what is new only
        texts    token ids of the answers by session
        """
        self._num_requests += 1
        names = {session: f"{session}.{self._num_requests}" for session in prompts}
        started = time.perf_counter()
        for session, prompt in prompts.items():
            self._runner.text_by_request[names[session]] = texts[session]
            turn = {"session_id": session, "truncation": self._truncation, "append": append}
            self._engine.submit(request(names[session], prompt, len(texts[session]), **turn))
        first = self._run(started)
        return [Heard(self._runner.thoughts_by_request.pop(name), *first[name]) for name in names.values()]

    def _run(self, started: float) -> dict[str, tuple[PromptUsage, float]]:
        first: dict[str, tuple[PromptUsage, float]] = {}
        while self._engine.has_work:
            events = self._engine.step()
            now_s = time.perf_counter() - started
            for event in events:
                if event.error is not None:
                    raise MnemeError(f"{event.request_id}: {event.error}")
                if event.usage is not None:
                    first[event.request_id] = (event.usage, now_s)
        return first


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


class Question(NamedTuple):
    """A session in token ids."""

    history: list[int]  # a text, then the case
    asked: list[int]
    answer: int


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


def questions(tokenizer: Tokenizer, text: list[int], num_cases: int, num_history: int, seed: int) -> list[Question]:
    """Each history is held-out text that the case at its end makes `num_history` tokens long."""
    rng = random.Random(seed)
    found = []
    cases = px_cases(seed, num_cases=num_cases, num_chunks=NUM_CHUNKS, num_sentences=NUM_SENTENCES)
    for case, fact in cases:
        told = [token_id for chunk in case.chunks for token_id in encode_ids(tokenizer, chunk)]
        num_before = num_history - len(told) - 1
        start = rng.randrange(len(text) - num_before)
        history = [text[0], *text[start : start + num_before], *told]
        found.append(Question(history, encode_ids(tokenizer, fact.question), encode_ids(tokenizer, fact.answer)[0]))
    return found


class Bench:
    """The model under both kinds of attention, and the text."""

    def __init__(self, scale: Scale, seed: int, model: str) -> None:
        folder = model_directory(model)
        self._scale, self._seed, self._is_tiny = scale, seed, model == TINY
        self._decoder: Decoder = load_decoder(folder)
        self._dense = load_decoder(folder, DenseDecoder)
        assert isinstance(self._dense, DenseDecoder)
        self._tokenizer = load_tokenizer(folder)
        self._text = held_out_ids(self._tokenizer)
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
        checks = checks_of_perplexity(max(ratios[OURS]), min(ratios[NKVT], default=None))
        return PartResult(name="perplexity", title="of text behind the first overflow", rows=rows, checks=checks)

    def retrieval(self) -> PartResult:
        rows = []
        for window in self._scale.story_windows:
            asked = questions(self._tokenizer, self._text, self._scale.num_cases, window - NUM_SPARE, self._seed)
            rows += self._retrieval_rows(asked, window)
        below = [row["below TT"] for row in rows if row["arm"] == OURS and not row["keeps"]]
        checks = checks_of_retrieval(max(below))
        title = "a question behind the overflow whose answer was kept"
        return PartResult(name="retrieval", title=title, rows=rows, checks=checks)

    def turns(self) -> PartResult:
        rows = [row for window in self._scale.turn_windows for row in self._turn_rows(window)]
        title = f"conversations past their window, {TURN_TOKENS} tokens a turn"
        return PartResult(name="turns", title=title, rows=rows)

    def _perplexity_rows(self, texts: torch.Tensor, window: int, ratio: float) -> list[dict[str, Any]]:
        rows = []
        for keeps, setting in self._settings.items():
            arms = [arm for arm in arms_of(keeps) if arm != NKVT or not self._has_windows]
            means: dict[str, list[float]] = {}
            for arm in arms:
                truncation = Truncation(strategy=STRATEGIES[arm], ratio=ratio, **setting)  # type: ignore[arg-type]
                means[arm] = [mean_nats(own, window) for own in self._read(arm, texts, window, truncation)]
            base = means.setdefault(TT, rows[0]["_means"] if rows else [])
            for arm in arms:
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
                batches = [asked[start : start + BATCH] for start in range(0, len(asked), BATCH)]
                hits = [hit for batch in batches for hit in self._answers(arm, batch, window, truncation)]
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
    return {"": (TT, OURS, NKVT), "no sinks": (OURS,), "important": (OURS,)}[keeps]


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
    """Sum up the turns behind the first; one that dropped tokens before its answer is a truncation."""
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


def checks_of_perplexity(ours: float | None = None, nkvt: float | None = None) -> list[Check]:
    return [
        at_most("perplexity_ours_over_tt", ours, MOST_OVER_TT),
        at_least("perplexity_nkvt_over_tt", nkvt, CLEARLY_WORSE),
    ]


def checks_of_retrieval(below: float | None = None) -> list[Check]:
    return [at_most("retrieval_ours_below_tt", below, MOST_BELOW_TT, "accuracy")]


def main() -> None:
    parser = options_of(__doc__, quick="one window, one ratio, 200 questions; at most 90 s", out=True)
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; may be given more than once")
    parser.add_argument("--model", default=TINY)
    args = parser.parse_args()
    run = Run("truncation", args, threads=1, python=platform.python_version(), dtype="float32", model=args.model)
    is_tiny = args.model == TINY
    bench = Bench(QUICK if args.quick else FULL if is_tiny else REAL, args.seed, args.model)
    parts = [getattr(bench, name)() for name in args.only or (PARTS if is_tiny else PARTS[:1])]
    results = {run.show(part).name: part.rows for part in parts}
    for name, checks in (("perplexity", checks_of_perplexity()), ("retrieval", checks_of_retrieval())):
        run.check(*(checks if name not in results else ()))
    run.end(results)


if __name__ == "__main__":
    main()
