"""What a grammar costs a decode step: its state, its masks, and the draw inside them.

    python benchmarks/bench_grammar.py [--quick] [--rows 16]

Two engines over the same weights, one whose rows write any text and one whose rows write a JSON list of objects under a
schema, all drawn at temperature 1. They step in turn, and `added` is the median over the pairs of steps of what the
second took beyond the first, as a share of the first. Times are CPU times of the process: all runs in one thread, and
what else the machine does does not count. Models: mneme-tiny, and random weights in two shapes: 31 million parameters
with 8,192 tokens, and the same layers with 128,256 tokens as Llama 3 has. The vocabularies of both are made up:
byte-level, of letters and blanks joined at random.

Bound: the interpreter's calls for each row, and at 128k tokens the memory that a mask of the logits reads and
writes. On a GPU the masks are made while it computes the logits; that is not measured here.
"""

from __future__ import annotations

import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import random
from typing import NamedTuple

import tokenizers
import torch
from engines import DTYPE, make_decoder
from harness import PartResult, Run, at_most, options_of
from random_models import SHAPES

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.directory import load_model_config, model_directory
from mneme.replicas.model.runner import Runner
from mneme.replicas.model.weights import load_weights
from mneme.replicas.request import GenerationRequest, Grammar, SamplingParams
from mneme.replicas.text.tokenizer import Tokenizer

_TARGET_PERCENT, _PROMISED_ROWS = 5.0, 16
_END = "<end>"
_MAX_TOKEN_CHARS = 12
_ITEM = {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "integer"}}}
# It does not end before a benchmark does.
_SCHEMA = {"type": "array", "items": _ITEM | {"required": ["name", "size"]}, "minItems": 1000}


class Model(NamedTuple):
    name: str
    decoder: Decoder
    tokenizer: Tokenizer


def made_up_tokenizer(vocab_size: int, seed: int) -> Tokenizer:
    """A byte-level tokenizer whose tokens are letters and a blank before them, as words and their parts are."""
    rng = random.Random(seed)
    letters = list("ĠetaoinshrdlucmfwypvbgkqjxzETAOINS0123456789")
    pieces, known = letters[:], set(letters)
    vocabulary = [*tokenizers.pre_tokenizers.ByteLevel.alphabet(), _END]
    merges = []
    while len(vocabulary) < vocab_size:
        left, right = rng.choice(pieces), rng.choice(pieces if rng.random() < 0.5 else letters)
        joined = left + right
        if joined in known or "Ġ" in right or len(joined) > _MAX_TOKEN_CHARS:
            continue
        known.add(joined)
        pieces.append(joined)
        vocabulary.append(joined)
        merges.append((left, right))
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: index for index, token in enumerate(vocabulary)}, merges)
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([_END])
    return Tokenizer(backend, eos_token_ids=(vocabulary.index(_END),))


def models(seed: int) -> list[Model]:
    """All of `main`'s, the smallest step first."""
    tiny = model_directory("mneme-tiny")
    config = load_model_config(tiny)
    decoder = Decoder(config, load_weights(tiny, config, torch.device("cpu"), DTYPE))
    made = [Model("mneme-tiny", decoder, Tokenizer.load(tiny))]
    for name, vocab_size in (("31M", 8192), ("128k vocabulary", 128256)):
        shape = SHAPES["llama-31m"] | {"vocab_size": vocab_size}
        made.append(Model(name, make_decoder(shape, seed), made_up_tokenizer(vocab_size, seed)))
    return made


def decoding_engine(model: Model, grammar: Grammar | None, num_rows: int, num_steps: int) -> Engine:
    """An engine whose next `num_steps` steps are of `num_rows` rows that decode."""
    num_pages = num_rows * (num_steps // 32 + 4)
    engine = Engine(
        Runner(model.decoder, num_pages, 32),
        model.tokenizer,
        EngineConfig(),
        eos_token_ids=model.tokenizer.eos_token_ids,
    )
    ids = tuple(model.tokenizer.encode("Hello"))
    for index in range(num_rows):
        sampling = SamplingParams(max_tokens=num_steps + 8, seed=index, grammar=grammar, ignore_eos=True)
        engine.submit(GenerationRequest(request_id=str(index), prompt_token_ids=ids, sampling=sampling))
    begun: set[str] = set()
    while len(begun) < num_rows:
        begun.update(event.request_id for event in engine.step() if event.token_ids)
    return engine


def step_s(engine: Engine, num_rows: int) -> float:
    started_s = time.process_time()
    events = engine.step()
    took_s = time.process_time() - started_s
    assert sum(len(event.token_ids) for event in events) == num_rows
    return took_s


def measure(model: Model, num_rows: int, num_steps: int) -> dict[str, float | str]:
    """Step both engines in turn, each first every second time."""
    free = decoding_engine(model, None, num_rows, num_steps)
    kept = decoding_engine(model, Grammar("json_schema", _SCHEMA), num_rows, num_steps)
    pairs = []
    for number in range(num_steps):
        if number % 2:
            free_s = step_s(free, num_rows)
            kept_s = step_s(kept, num_rows)
        else:
            kept_s = step_s(kept, num_rows)
            free_s = step_s(free, num_rows)
        pairs.append((free_s, kept_s))
    free_s = statistics.median(free_s for free_s, _ in pairs)
    added_s = statistics.median(kept_s - free_s for free_s, kept_s in pairs)
    return {
        "model": model.name,
        "free_ms": free_s * 1e3,
        "grammar_ms": statistics.median(kept_s for _, kept_s in pairs) * 1e3,
        "added_ms": added_s * 1e3,
        "added_percent": 100 * added_s / free_s,
    }


def main() -> None:
    parser = options_of(__doc__, quick="60 steps instead of 300")
    parser.add_argument("--rows", type=int, default=_PROMISED_ROWS)
    args = parser.parse_args()
    num_steps = 60 if args.quick else 300
    run = Run("grammar", args, threads=1, rows=args.rows, steps=num_steps, dtype=str(DTYPE))
    part = PartResult(name="grammar", title=f"a decode step of {args.rows} rows with and without a schema")
    for model in models(args.seed):
        row = measure(model, args.rows, num_steps)
        part.rows.append(row)
        added = float(row["added_percent"]) if args.rows == _PROMISED_ROWS else None
        part.checks.append(at_most(f"added to a step of {model.name}", added, _TARGET_PERCENT, "%"))
    part.checks.append(at_most("added to a step on a GPU", None, _TARGET_PERCENT, "%"))
    run.show(part)
    run.end(part.rows)


if __name__ == "__main__":
    main()
