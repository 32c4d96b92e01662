"""A checkpoint beside `transformers`: greedy tokens, and a prefill.

    python benchmarks/bench_real_model.py [--model smollm2] [--only greedy|prefill] [--quick] [--out FOLDER]

The text is Python's own documentation (`pydoc_data.topics`, PSF licence), which every interpreter has. `transformers`
gets the tensors that the engine reads, so a quantized file is compared as what it is dequantized to. Greedy tokens are
equal if each is the best of `transformers`' logits for the same prompt and the tokens before, or within 1e-3 of it.
`prefill` is one step over a prompt of 2,048 tokens, of a random Llama of 31M parameters (workloads.py) and of `--model`
(with `--quick` not), by the kernels that an engine chooses here, and `transformers`' forward with its SDPA: one thread,
its own time, in turns; `old` is ours without the choice. Bound by arithmetic: 2 x parameters x tokens for each arm.
What dtypes and fewer bits do to predictions, `mneme quality MODEL --task text` says.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from harness import PartResult, Run, at_least, at_most, median_ratio, options_of, take_turns
from random_models import request
from workloads import write_random_llama

from mneme import LLM, SamplingParams
from mneme.kernels.native.choice import OURS, CpuKernels
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.build import choose_kernels
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.directory import load_model_config, model_directory
from mneme.replicas.model.runner import Runner
from mneme.replicas.model.weights import load_weights, open_files

NEAR = 1e-3  # between two logits that float32 may swap
BATCH = 8  # requests at a time: a prefix is shared by none
PARTS = ("greedy", "prefill")
PREFILL = 2048  # tokens
PAGE_SIZE = 32
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


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
    begun = [text[:600] for text in texts(count)]  # of a model without a template
    answers = llm.chat(talks, params) if llm.tokenizer.has_chat_template else llm.generate(begun, params)
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


def one_prefill(directory: Path, dtype: torch.dtype, kernels: CpuKernels) -> Callable[[torch.Tensor], object]:
    """One step of an engine over one prompt, plan and draw included."""
    config = load_model_config(directory)
    weights = load_weights(directory, config, torch.device("cpu"), dtype, torch_rows=kernels.product_rows)
    model = Runner(Decoder(config, weights, kernels=kernels), PREFILL // PAGE_SIZE + 8, PAGE_SIZE)

    def run(ids: torch.Tensor) -> None:
        engine = Engine(model, None, EngineConfig(max_batch_tokens=PREFILL))
        engine.submit(request("prompt", ids.tolist(), 1))
        assert engine.step()[0].token_ids

    return run


def prefill(directory: Path, folder: Path, num_rounds: int, *, quick: bool) -> PartResult:
    """A prompt's forward pass, ours with and without the choice beside `transformers`'."""
    part = PartResult(name="prefill", title=f"{PREFILL} tokens at once, milliseconds, medians of {num_rounds}")
    models = {"llama-31m": write_random_llama(folder / "llama-31m"), directory.name: directory}
    for name, of in models.items():
        if quick and of == directory:
            part.checks += [
                at_least(f"transformers' prefill over ours, {name}, {dtype}", None, 1.0) for dtype in DTYPES
            ]
            continue
        model = reference(of)
        for dtype_name, dtype in DTYPES.items():
            theirs = copy.deepcopy(model).to(dtype)
            chosen = choose_kernels("auto", torch.device("cpu"), dtype)
            arms: dict[str, Callable[[torch.Tensor], Any]] = {"ours": one_prefill(of, dtype, chosen)}
            if chosen != OURS:
                arms["old"] = one_prefill(of, dtype, OURS)
            arms["transformers"] = lambda ids, model=theirs: model(ids[None], use_cache=True, logits_to_keep=1)
            ids = torch.randint(16, model.config.vocab_size, (PREFILL,))

            def take(arm: str, arms: Any = arms, ids: torch.Tensor = ids) -> float:
                started = time.thread_time()
                with torch.inference_mode():
                    arms[arm](ids)
                return time.thread_time() - started

            seconds = take_turns(arms, take, num_rounds)
            row = {arm: 1e3 * statistics.median(values) for arm, values in seconds.items()}
            ratio = median_ratio(seconds["transformers"], seconds["ours"])
            part.rows.append({"model": name, "dtype": dtype_name, "kernels": str(chosen), **row, "ratio": ratio})
            part.checks.append(at_least(f"transformers' prefill over ours, {name}, {dtype_name}", ratio, 1.0))
    return part


def main() -> None:
    parser = options_of(__doc__, quick="4 prompts of 24 tokens, the random model's prefill", seed=False, out=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--only", choices=PARTS)
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.tokens = 4, 24
    run = Run("real_model", args, threads=1, model=args.model, transformers=transformers.__version__)
    directory = model_directory(args.model)
    parts = []
    if args.only != "prefill":
        config = {"max_context": 2048, "max_running": BATCH, "generation_config": "none"}
        with LLM(args.model, dtype="float32", config=config) as llm:
            parts.append(run.show(greedy(llm, reference(directory), args.prompts, args.tokens)))
    if args.only != "greedy":
        with tempfile.TemporaryDirectory() as folder:
            parts.append(run.show(prefill(directory, Path(folder), 2 if args.quick else 5, quick=args.quick)))
    run.end([asdict(part) for part in parts])


if __name__ == "__main__":
    main()
