"""A real checkpoint beside `transformers`: greedy tokens, perplexity of real text, and best tokens that are the same.

    python benchmarks/bench_real_model.py [--model smollm2] [--quick] [--out FOLDER]

The text is Python's own documentation (`pydoc_data.topics`, PSF licence), which every interpreter has. `transformers`
gets the tensors that the engine reads, so a quantized file is compared as what it is dequantized to. Greedy tokens are
equal if each is the best of `transformers`' logits for the same prompt and the tokens before, or within 1e-3 of it.
Bound by arithmetic: 2 x parameters x tokens for each of the four arms.
"""

from __future__ import annotations

import copy
import math
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from harness import PartResult, Run, at_least, at_most, options_of

from mneme import LLM, SamplingParams
from mneme.replicas.model.config import model_directory
from mneme.replicas.model.weights import open_files

NEAR = 1e-3  # between two logits that float32 may swap
BATCH = 8  # requests at a time: a prefix is shared by none


def reference(directory: Path) -> Any:
    """`transformers`' model of the engine's tensors, float32."""
    described = transformers.AutoConfig.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.float32).eval()
    with ExitStack() as stack:
        files = open_files(directory, torch.device("cpu"), torch.float32, stack)
        state = {name: files.tensor(name) for name in model.state_dict() if files.has(name)}
    missing, _ = model.load_state_dict(state, strict=False)
    model.tie_weights()
    assert set(missing) <= {"lm_head.weight"}, missing
    return model


@torch.no_grad()
def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    """float32 [tokens, vocab]"""
    return model(torch.tensor([ids])).logits[0].float()


def texts(count: int) -> list[str]:
    """Beginnings of help topics, the longest first."""
    return sorted(topics.values(), key=lambda text: (-len(text), text))[:count]


def greedy(llm: LLM, model: Any, count: int, num_tokens: int) -> PartResult:
    """Answers to questions about real text, and what `transformers` thinks of each token."""
    talks = [[{"role": "user", "content": f"Say in short what this means:\n{text[:600]}"}] for text in texts(count)]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    started = time.perf_counter()
    answers = llm.chat(talks, params) if llm.tokenizer.has_chat_template else llm.generate(texts(count), params)
    took_s = time.perf_counter() - started
    num_equal = num_near = num_other = 0
    for answer in answers:
        ids, said = list(answer.prompt_token_ids), list(answer.outputs[0].token_ids)
        logits = logits_of(model, ids + said)[len(ids) - 1 : -1]
        lack = logits.max(-1).values - logits.gather(-1, torch.tensor(said)[:, None])[:, 0]
        num_equal += int((lack == 0).sum())
        num_near += int(((lack > 0) & (lack <= NEAR)).sum())
        num_other += int((lack > NEAR).sum())
    part = PartResult(name="greedy", title=f"{count} prompts, {num_tokens} tokens each, float32")
    rate = count * num_tokens / took_s
    part.rows = [{"equal": num_equal, "near ties": num_near, "other": num_other, "tokens/s": rate}]
    part.checks = [at_most("tokens that are not transformers' best", float(num_other), 0, "tokens")]
    return part


def windows(llm: LLM, count: int, size: int) -> list[list[int]]:
    """Token ids of real text."""
    joined = llm.tokenizer.encode("\n\n".join(texts(60)), add_special_tokens=False)
    return [joined[start : start + size] for start in range(0, count * size, size)]


def ours(llm: LLM, ids: list[list[int]]) -> tuple[float, list[int]]:
    """Perplexity, and the best token at each place."""
    outputs = llm.generate(ids, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    found = [each for output in outputs for each in (output.prompt_logprobs or ()) if each is not None]
    return math.exp(-sum(each.logprob for each in found) / len(found)), [each.top[0][0] for each in found]


def theirs(model: Any, ids: list[list[int]]) -> tuple[float, list[int]]:
    """The same of `transformers`."""
    total, best = 0.0, []
    for window in ids:
        logprobs = logits_of(model, window)[:-1].log_softmax(-1)
        total -= float(logprobs.gather(-1, torch.tensor(window[1:])[:, None]).sum())
        best += logprobs.argmax(-1).tolist()
    return math.exp(total / len(best)), best


def read(args: Any, model: Any, ids: list[list[int]], config: dict[str, Any]) -> PartResult:
    """Perplexity of both in both dtypes, and the share of places whose best token is float32's."""
    part = PartResult(name="text", title=f"{sum(map(len, ids)):,} tokens of Python's documentation")
    exact, reference_best = theirs(model, ids)
    agreement: dict[str, float] = {}

    def row(name: str, perplexity: float, best: list[int]) -> None:
        same = sum(a == b for a, b in zip(best, reference_best, strict=True)) / len(best)
        agreement[name] = same
        part.rows.append({"arm": name, "perplexity": perplexity, "best token as in float32": same})

    row("transformers float32", exact, reference_best)
    for dtype in ("float32", "bfloat16"):
        with LLM(args.model, dtype=dtype, config=config) as llm:
            row(f"mneme {dtype}", *ours(llm, ids))
    row("transformers bfloat16", *theirs(copy.deepcopy(model).to(torch.bfloat16), ids))
    part.checks = [
        at_least("best tokens of float32 that are transformers'", agreement["mneme float32"], 0.9995, "of places"),
        at_least(
            "best tokens of bfloat16, beside transformers in bfloat16",
            agreement["mneme bfloat16"] / agreement["transformers bfloat16"], 1.0, noise=0.002,
        ),
    ]  # fmt: skip
    return part


def main() -> None:
    parser = options_of(__doc__, quick="4 prompts of 24 tokens, 2 windows", seed=False, out=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--windows", type=int, default=16, help="of 512 tokens")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.tokens, args.windows = 4, 24, 2
    run = Run("real_model", args, threads=1, model=args.model, transformers=transformers.__version__)
    model = reference(model_directory(args.model))
    config = {"max_context": 2048, "max_running": BATCH, "generation_config": "none"}
    with LLM(args.model, dtype="float32", config=config) as llm:
        ids = windows(llm, args.windows, 512)
        parts = [run.show(greedy(llm, model, args.prompts, args.tokens))]
    parts.append(run.show(read(args, model, ids, config)))
    run.end([asdict(part) for part in parts])


if __name__ == "__main__":
    main()
