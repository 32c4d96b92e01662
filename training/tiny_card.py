"""Write the model card of `mneme-tiny` from the training record and the measured figures.

python training/tiny_card.py [--model DIR] [--figures FILE]
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from evaluate_tiny import DEFAULT_MODEL, DEFAULT_OUT

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
language: en
---
# mneme-tiny

A {parameters:.1f} M parameter model in the Llama layout ({layers} layers, width {width}, {heads} query
and {kv_heads} key/value heads of {head_dim}, tied embeddings, vocabulary {vocab}, context {context}). It
ships inside the package so that demos, tests and quality measurements run anywhere, offline, in seconds.
It is a test model, not an assistant.

`model.safetensors` is bfloat16, {megabytes:.1f} MB, sha256 `{sha256}`.

## Figures

Measured on these files (seed {eval_seed}, float32 on {machine}, {eval_threads} thread, {eval_wall_s:.0f} s) by

    python training/evaluate_tiny.py --out benchmarks/results/mneme-tiny-quality.json

Documents are held out; coreference cases come from a seed of their own; conversations come from the generator that
training used, so the shortest of them occurred there word for word.

### Cross-chunk coreference

"Now Alice." sets who is spoken about, "She likes tea." states a fact, "Emma plays chess." is about
somebody else. The question asks for a fact whose subject was named in an *earlier chunk*, and the answer
is one token. Full reuse encodes every chunk on its own at its final position; the question then attends
to all of them. The first guess knows the verb and that the answer stands behind a pronoun; the second
also resolves each chunk perfectly on its own and guesses among the facts that are left.

| chunks x sentences | cases | full attention | full reuse | guess among pronouns | guess among orphans |
|---|---|---|---|---|---|
{coreference}

### Text

| held-out source / window | perplexity per token | of token frequencies alone | bits per byte | tokens |
|---|---|---|---|---|
{text}

Perplexity by position, over documents that fill the context: {by_position}.

### Chat

Exact last answer of a generated conversation, `<|im_end|>` included, greedy. The guess gives the most frequent
answer of the same conversations to all of them.

| skill | conversations | exact | guess |
|---|---|---|---|
{chat}

## Tokens and chat template

Byte-level BPE: every text without lone surrogates comes back from `decode(encode(text))`. Names and
values of the tasks are single tokens. Special tokens: `<|pad|>` 0, `<|bos|>` 1, `<|im_start|>` 2,
`<|im_end|>` 3 (end of a turn).

BOS stands once at the start of every sequence. The **tokenizer** adds it to raw prompts
(`add_special_tokens=True`, the default); the **chat template** writes it itself, so rendered chats are
tokenized with `add_special_tokens=False`, as `apply_chat_template(tokenize=True)` does. Documents that
are encoded on their own take no BOS.

The template changes no character of a message, and the rendering of turns 1..k plus the answer is a
prefix of the rendering of turns 1..k+1.

## Training

    python training/train_tiny.py --threads {threads}

{wall_min:.0f} minutes of wall clock on {threads} thread of {cpu} (torch {torch},
Python {python}): {tokens:.1f} M tokens in {steps} steps, seed {seed}. Steps of its
phases: {phases}.

The seed fixes the initial weights and the data of each step, not the last bit of the result. Muon trains the
layers' matrices, AdamW the embedding and the norms. The copy phase comes first because the coreference task does
not leave its guessing plateau without it. Chunk boundaries are never marked and never trained on; loss in
conversations is on the assistant's words.

Questions that ask for the name ("Who likes tea?", one look-up less) stand among those of easy cases only: without
them the task stayed at its guessing plateau for 900 steps, and later on they hold it up. The tokenizer was trained
before the white space of the generated text was changed once; with the present generators training it anew gives the
same tokens under other ids, which is why an existing tokenizer is kept.

| text | licence | characters |
|---|---|---|
{sources}
| tasks and conversations, generated (`training/tiny_*.py`) | Apache-2.0, this project | unlimited |

{documents} documents, {held_out} of them held out by a hash of their name. The corpus is not
redistributed. CPython's help topics and docstrings are under the PSF licence version 2; the PostgreSQL 15 manual
(`postgresql-doc-15`) is Copyright the PostgreSQL Global Development Group and The Regents of the University of
California, under the PostgreSQL licence.

## Limits

- It knows two technical manuals and the word lists of its tasks. It has no general knowledge, reasons
  about nothing and will say false things fluently.
- The coreference figures hold for the sentence templates and names of the task, not for free English; with
  sentences that state nothing between the facts (`+scenes`) accuracy is clearly lower.
- Chat answers are reliable only for the skills whose figure above is near 1, in English, in the phrasings of the
  generator; anything else gets one of those answers or nonsense.
- Never a basis for a speed claim about larger models; only for correctness and relative quality."""
LICENCES = {
    "cpython": ("CPython standard library: help topics and docstrings", "PSF-2.0"),
    "postgresql-doc-15": ("PostgreSQL 15 manual, Debian package postgresql-doc-15", "PostgreSQL"),
}


def coreference_rows(figures: dict[str, dict[str, float]]) -> str:
    return "\n".join(
        f"| {name} | {row['num_cases']} | {row['full']:.3f} | {row['full_reuse']:.3f} "
        f"| {row['guess_among_pronouns']:.3f} | {row['guess_among_orphans']:.3f} |"
        for name, row in figures.items()
    )


def text_rows(figures: dict[str, dict[str, float]]) -> str:
    return "\n".join(
        f"| {name} | {row['perplexity']:.1f} | {row['guess_by_frequency']:.0f} "
        f"| {row['bits_per_byte']:.3f} | {row['num_tokens']} |"
        for name, row in figures.items()
    )


def source_rows(chars_by_source: dict[str, int]) -> str:
    return "\n".join(
        f"| {LICENCES[source][0]} | {LICENCES[source][1]} | {chars / 1e6:.1f} M |"
        for source, chars in chars_by_source.items()
    )


def chat_rows(figures: dict[str, dict[str, float]], num_chats: int) -> str:
    return "\n".join(
        f"| {name} | {num_chats} | {row['exact']:.2f} | {row['guess']:.2f} |" for name, row in figures.items()
    )


def listed(figures: dict[str, float], digits: int) -> str:
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in figures.items())


def card(config: dict[str, Any], run: dict[str, Any], quality: dict[str, Any], weights: bytes) -> str:
    """The text of README.md; refuses figures that were taken on other weights."""
    sha256 = hashlib.sha256(weights).hexdigest()
    if quality["model_sha256"] != sha256:
        raise ValueError(f"figures are for weights {quality['model_sha256']}, the folder holds {sha256}")
    return CARD.format(
        parameters=run["num_parameters"] / 1e6,
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab=config["vocab_size"],
        context=config["max_position_embeddings"],
        megabytes=len(weights) / 1e6,
        sha256=sha256,
        eval_seed=quality["seed"],
        machine=quality["machine"],
        eval_threads=quality["threads"],
        eval_wall_s=quality["wall_s"],
        coreference=coreference_rows(quality["coreference"]),
        text=text_rows(quality["text"]),
        by_position=listed(quality["perplexity_by_position"], 1),
        chat=chat_rows(quality["chat"], quality["num_chats"]),
        threads=run["threads"],
        wall_min=run["wall_s"] / 60,
        cpu=run["cpu"],
        torch=run["torch"],
        python=run["python"],
        tokens=run["num_tokens"] / 1e6,
        steps=sum(run["steps_by_phase"].values()),
        seed=run["seed"],
        phases=listed(run["steps_by_phase"], 0),
        sources=source_rows(run["chars_by_source"]),
        documents=run["num_documents"],
        held_out=run["num_held_out_documents"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--figures", type=Path, default=DEFAULT_OUT)
    options = parser.parse_args()
    config, run = (json.loads((options.model / name).read_text()) for name in ("config.json", "training_run.json"))
    quality = json.loads(options.figures.read_text())
    weights = (options.model / "model.safetensors").read_bytes()
    (options.model / "README.md").write_text(card(config, run, quality, weights))


if __name__ == "__main__":
    main()
