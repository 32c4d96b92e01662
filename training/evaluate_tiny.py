"""Measure the shipped `mneme-tiny` and write its figures, one command for all of them.

    python training/evaluate_tiny.py [--quick] [--model DIR] [--out FILE] [--threads N]

Bound by matrix products of the CPU. Coreference: accuracy with full attention and with full reuse (chunks
encoded independently at their final positions, the question attends to all), next to what an informed guess
reaches on the same questions. Text: perplexity of held-out documents. Chat: exact last answers by skill.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from tiny_checks import chat_accuracy, coreference_accuracy, document_nats, unigram_perplexity
from tiny_corpus import Document, collect
from tiny_export import load
from tiny_host import cpu_name
from tiny_model import TinyLlama
from tiny_tokenizer import CONTEXT_TOKENS
from tokenizers import Tokenizer

from mneme.lab.quality.coreference import Case, Fact, px_cases

SEED = 1234
ROOT = Path(__file__).resolve().parent.parent
DEFAULT_MODEL = ROOT / "replicas" / "mneme_tiny"
DEFAULT_OUT = ROOT / "benchmarks" / "results" / "mneme-tiny-quality.json"
LAYOUTS = ((8, 4, 0.0), (12, 4, 0.0), (16, 2, 0.0), (8, 8, 0.3))
"""Chunks per case, sentences per chunk, share of sentences that state nothing."""
MAIN_LAYOUT = "8x4"
WINDOWS = (256, 1024, CONTEXT_TOKENS)
Checks = list[dict[str, object]]


def mean_guess(cases: list[tuple[Case, Fact]]) -> dict[str, float]:
    """Expected accuracy of two informed guesses on these questions.

    pronouns  of a reader who knows the verb and that the answer stands behind a pronoun
    orphans   of one who also resolves every chunk on its own and guesses among the rest
    """
    kinds = {"guess_among_pronouns": ("local", "px"), "guess_among_orphans": ("px",)}
    return {
        name: sum(1 / sum(f.verb == asked.verb and f.kind in among for f in case.facts) for case, asked in cases)
        / len(cases)
        for name, among in kinds.items()
    }


def coreference(model: TinyLlama, tokenizer: Tokenizer, num_cases: int) -> dict[str, dict[str, float]]:
    """Figures by layout."""
    figures = {}
    for num_chunks, num_sentences, scene_share in LAYOUTS:
        cases = list(
            px_cases(
                SEED,
                num_cases=num_cases,
                num_chunks=num_chunks,
                num_sentences=num_sentences,
                scene_share=scene_share,
            )
        )
        name = f"{num_chunks}x{num_sentences}" + (f"+scenes{scene_share}" if scene_share else "")
        figures[name] = {
            "num_cases": num_cases,
            "full": coreference_accuracy(model, tokenizer, cases, reuse=False),
            "full_reuse": coreference_accuracy(model, tokenizer, cases, reuse=True),
        } | mean_guess(cases)
        print(name, figures[name], file=sys.stderr, flush=True)
    return figures


def text(
    model: TinyLlama, tokenizer: Tokenizer, documents: list[Document], max_tokens: int
) -> dict[str, dict[str, float]]:
    """Perplexity per token and bits per byte of held-out documents, by source and window."""
    figures = {}
    for source in sorted({document.source for document in documents}):
        own = [document for document in documents if document.source == source]
        texts = [document.text for document in own if document.held_out]
        known = [document.text for document in own if not document.held_out]
        guess = unigram_perplexity(tokenizer, known, texts)
        for window in WINDOWS:
            nats, num_tokens, num_bytes = document_nats(model, tokenizer, texts, window=window, max_tokens=max_tokens)
            figures[f"{source}/{window}"] = {
                "perplexity": math.exp(nats / num_tokens),
                "bits_per_byte": nats / math.log(2) / num_bytes,
                "num_tokens": num_tokens,
                "guess_by_frequency": guess,
            }
            print(source, window, figures[f"{source}/{window}"], file=sys.stderr, flush=True)
    return figures


def late_perplexity(
    model: TinyLlama, tokenizer: Tokenizer, documents: list[Document], num_texts: int
) -> dict[str, float]:
    """Perplexity by position, over documents that fill the context."""
    encoded = [tokenizer.encode(document.text).ids for document in documents if document.held_out]
    full = [ids[:CONTEXT_TOKENS] for ids in encoded if len(ids) >= CONTEXT_TOKENS][:num_texts]
    losses = torch.stack([_losses(model, torch.tensor(ids)) for ids in full]).mean(dim=0)
    return {
        f"{start}-{start + 256}": losses[start : start + 256].mean().exp().item()
        for start in range(0, CONTEXT_TOKENS, 256)
    }


@torch.inference_mode()
def _losses(model: TinyLlama, ids: torch.Tensor) -> torch.Tensor:
    logits = model.logits(model.hidden(ids[None, :-1])[0])
    return torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")


def checks_of(figures: dict[str, dict[str, float]]) -> Checks:
    """The promises of the model card."""
    main = figures[MAIN_LAYOUT]
    return [
        {
            "name": "px_full_attention",
            "value": main["full"],
            "unit": "accuracy",
            "target": ">= 0.97",
            "ok": main["full"] >= 0.97,
        },
        {
            "name": "px_full_reuse",
            "value": main["full_reuse"],
            "unit": "accuracy",
            "target": "<= 0.80",
            "ok": main["full_reuse"] <= 0.80,
        },
    ]


def evaluate(folder: Path, work: Path, *, quick: bool) -> dict[str, object]:
    """All figures with the circumstances under which they were taken."""
    started = time.monotonic()
    model, tokenizer = load(folder)
    documents = collect(work, manual=not quick)
    num_chats = 5 if quick else 60
    figures = coreference(model, tokenizer, 64 if quick else 400)
    return {
        "benchmark": "mneme-tiny quality",
        "model_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "seed": SEED,
        "machine": cpu_name(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "bound": "matrix products of the CPU, one sequence at a time, float32",
        "coreference": figures,
        "text": text(model, tokenizer, documents, 4_000 if quick else 30_000),
        "perplexity_by_position": late_perplexity(model, tokenizer, documents, 2 if quick else 12),
        "num_chats": num_chats,
        "chat": chat_accuracy(model, tokenizer, seed=SEED, num_chats=num_chats),
        "wall_s": round(time.monotonic() - started, 1),
        "checks": checks_of(figures),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases, standard library text only")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--work", type=Path, default=ROOT / ".work" / "corpus", help="folder of the downloaded text")
    parser.add_argument("--out", type=Path, help="JSON file; without it only the last line is printed")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = evaluate(options.model, options.work, quick=options.quick)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
