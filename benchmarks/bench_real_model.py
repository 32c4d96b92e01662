"""A checkpoint beside `transformers`: greedy tokens, perplexity of text, best tokens, how far dtypes are, a prefill.

    python benchmarks/bench_real_model.py [--model smollm2] [--only greedy|text|prefill]... [--quick] [--out FOLDER]

The text is Python's own documentation (`pydoc_data.topics`, PSF licence), which every interpreter has. `transformers`
gets the tensors that the engine reads, so a quantized file is compared as what it is dequantized to. Greedy tokens are
equal if each is the best of `transformers`' logits for the same prompt and the tokens before, or within 1e-3 of it.
`KL` is from `transformers` in float32, nats a token. A GGUF file is also written in other formats (by the `gguf`
package, from what it dequantizes to) and read as float32: what a format alone costs, on top of the file's own.
`prefill` is one step over a prompt of 2,048 tokens, of a random Llama of 31M parameters (workloads.py) and of `--model`
(with `--quick` not), by the kernels that an engine chooses here, and `transformers`' forward with its SDPA: one thread,
its own time, in turns; `old` is ours without the choice. Bound by arithmetic: 2 x parameters x tokens for each arm.
"""

from __future__ import annotations

import copy
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from operator import truediv
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any
from unittest import mock

import gguf
import torch
import transformers
from engines import request
from harness import PartResult, Run, at_least, at_most, options_of
from workloads import write_random_llama

from mneme import LLM, SamplingParams
from mneme.kernels.native.choice import OURS, CpuKernels
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.build import choose_kernels
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model import runner, sampler
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.directory import load_model_config, model_directory
from mneme.replicas.model.runner import Runner
from mneme.replicas.model.weights import load_weights, open_files
from mneme.replicas.request import PromptLogprobs

NEAR = 1e-3  # between two logits that float32 may swap
BATCH = 8  # requests at a time: a prefix is shared by none
PARTS = ("greedy", "text", "prefill")
PREFILL = 2048  # tokens
PAGE_SIZE = 32
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
KINDS = ("BF16", "Q8_0", "Q4_1", "Q4_0")


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


def windows(llm: LLM, count: int, size: int) -> list[list[int]]:
    """Token ids of real text."""
    joined = llm.tokenizer.encode("\n\n".join(texts(60)), add_special_tokens=False)
    return [joined[start : start + size] for start in range(0, count * size, size)]


def ours(llm: LLM, window: list[int]) -> torch.Tensor:
    """What the engine thinks of all tokens behind the first; float32 [tokens - 1, vocab], logarithms."""
    heard: list[torch.Tensor] = []

    def note(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> PromptLogprobs:
        heard.append(logits.float().log_softmax(-1))
        return sampler.prompt_logprobs(logits, token_ids, num_top)

    with mock.patch.object(runner, "prompt_logprobs", note):
        llm.generate([window], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    return torch.cat(heard)


def theirs(model: Any, window: list[int]) -> torch.Tensor:
    """The same of `transformers`."""
    return logits_of(model, window)[:-1].log_softmax(-1)


def rewritten(directory: Path, kind: str, folder: Path) -> Path:
    """A GGUF file's copy whose matrices have another format; norms stay as they are."""
    source, path = gguf.GGUFReader(directory / "model.gguf"), folder / f"{kind}.gguf"
    fields = {name: each for name, each in source.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(path, fields.pop("general.architecture").contents())
    for name, each in fields.items():
        writer.add_key_value(name, each.contents(), each.types[0], each.types[-1] if len(each.types) > 1 else None)
    wanted = gguf.GGMLQuantizationType[kind]
    for tensor in source.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        kept = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else wanted
        writer.add_tensor(tensor.name, gguf.quantize(values, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(args: Any, directory: Path, model: Any, ids: list[list[int]], config: dict[str, Any]) -> PartResult:
    """Perplexity of both in both dtypes, and how far each is from float32."""
    part = PartResult(name="text", title=f"{sum(map(len, ids)):,} tokens of Python's documentation")
    exact = [theirs(model, window) for window in ids]
    agreement: dict[str, float] = {}

    def row(name: str, think: Callable[[list[int]], torch.Tensor]) -> None:
        nats, divergence, num_same, count = 0.0, 0.0, 0, 0
        for window, full in zip(ids, exact, strict=True):
            own = think(window)
            nats -= float(own.gather(-1, torch.tensor(window[1:])[:, None]).sum())
            divergence += float((full.exp() * (full - own)).sum())
            num_same += int((own.argmax(-1) == full.argmax(-1)).sum())
            count += len(own)
        agreement[name] = num_same / count
        figures = {"perplexity": math.exp(nats / count), "KL": divergence / count}
        part.rows.append({"arm": name, **figures, "best token as in float32": agreement[name]})

    row("transformers float32", partial(theirs, model))
    for dtype in ("float32", "bfloat16"):
        with LLM(args.model, dtype=dtype, config=config) as llm:
            row(f"mneme {dtype}", partial(ours, llm))
    row("transformers bfloat16", partial(theirs, copy.deepcopy(model).to(torch.bfloat16)))
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS if (directory / "model.gguf").exists() else ():
            with LLM(str(rewritten(directory, kind, Path(folder))), dtype="float32", config=config) as llm:
                row(f"mneme float32, file in {kind}", partial(ours, llm))
    part.checks = [
        at_least("best tokens of float32 that are transformers'", agreement["mneme float32"], 0.9995, "of places"),
        at_least(
            "best tokens of bfloat16, beside transformers in bfloat16",
            agreement["mneme bfloat16"] / agreement["transformers bfloat16"], 1.0, noise=0.002,
        ),
    ]  # fmt: skip
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
            seconds: dict[str, list[float]] = {arm: [] for arm in arms}
            for number in range(num_rounds + 1):
                ids = torch.randint(16, model.config.vocab_size, (PREFILL,))
                for arm in arms if number % 2 else reversed(arms):
                    started = time.thread_time()
                    with torch.inference_mode():
                        arms[arm](ids)
                    seconds[arm] += [time.thread_time() - started] if number else []  # the first is a warm-up
            row = {arm: 1e3 * statistics.median(values) for arm, values in seconds.items()}
            ratio = statistics.median(map(truediv, seconds["transformers"], seconds["ours"]))
            part.rows.append({"model": name, "dtype": dtype_name, "kernels": str(chosen), **row, "ratio": ratio})
            part.checks.append(at_least(f"transformers' prefill over ours, {name}, {dtype_name}", ratio, 1.0))
    return part


def main() -> None:
    parser = options_of(__doc__, quick="4 prompts of 24 tokens, 2 windows", seed=False, out=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--windows", type=int, default=16, help="of 512 tokens")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; may be given more than once")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.tokens, args.windows = 4, 24, 2
    run = Run("real_model", args, threads=1, model=args.model, transformers=transformers.__version__)
    directory = model_directory(args.model)
    model, parts, wanted = reference(directory), [], args.only or PARTS
    config = {"max_context": 2048, "max_running": BATCH, "generation_config": "none"}
    if "greedy" in wanted or "text" in wanted:
        with LLM(args.model, dtype="float32", config=config) as llm:
            ids = windows(llm, args.windows, 512)
            if "greedy" in wanted:
                parts.append(run.show(greedy(llm, model, args.prompts, args.tokens)))
    if "prefill" in wanted:
        with tempfile.TemporaryDirectory() as folder:
            parts.append(run.show(prefill(directory, Path(folder), 2 if args.quick else 5, quick=args.quick)))
    if "text" in wanted:
        parts.append(run.show(read(args, directory, model, ids, config)))
    run.end([asdict(part) for part in parts])


if __name__ == "__main__":
    main()
