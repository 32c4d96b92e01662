"""What a first request would build is built before it: requests run through engines that nobody keeps.

They run on the runner that will serve, so whatever is made on first use (compiled kernels, plans, pages of weights that
are read, imports) is there afterwards. The engines around it are thrown away: no token, session, metric, cached page or
learned cost is left of them. On a device three things happen, in this order:

- kernels: the launches of a few requests are recorded, then compiled by a pool of processes (`triton/precompile.py`).
- one greedy and one drawn request run.
- CUDA graphs: every shape of steps of up to 2,048 rows is captured, largest first (`StepGraphs.capture_all`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mneme.errors import ConfigError
from mneme.kernels.ops import draw_tokens
from mneme.kernels.triton.modules import triton_module, triton_trouble
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.directory import Progress
from mneme.replicas.model.runner import Runner
from mneme.replicas.request import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from mneme.kernels.triton.precompile import Variant
    from mneme.replicas.model.decoder import Decoder, StepInputs
    from mneme.replicas.text.tokenizer import Tokenizer


_NUM_ROWS, _NUM_OUTPUT = 64, 4
_ALL_OPTIONS = SamplingParams(max_tokens=_NUM_OUTPUT, top_p=0.9, top_k=40, repetition_penalty=1.1, logprobs=2, seed=0)
_GREEDY = SamplingParams(max_tokens=_NUM_OUTPUT, temperature=0, seed=0)
_PREFILL_ROWS = 256  # enough for tiles of prefills with any number of heads
# How what truncates and what does not are drawn: temperature and top-p of each launch that is recorded.
_DRAWS = ((0.0, 1.0), (1.0, 1.0), (1.0, 0.9))


def warm_up(runner: Runner, tokenizer: Tokenizer | None, config: EngineConfig, report: Progress) -> None:
    """Compile, run and capture what requests need. No page of the runner may be in use.

    Raises ConfigError if a kernel cannot be compiled or launched.
    """
    config = _without_limits(config)
    with _saying_trouble():
        _compile(runner, tokenizer, config, report)
        _run_once(runner, tokenizer, config)
        with runner.no_trace():
            runner.capture_graphs(
                config.max_running, config.max_batch_tokens, lambda share: report("CUDA graphs", share)
            )


def largest_step_bytes(
    decoder: Decoder, kv_dtype: torch.dtype, tokenizer: Tokenizer | None, config: EngineConfig, report: Progress
) -> int:
    """Run the largest step, over a small pool, and count the bytes of the GPU that it takes; kernels are compiled.

    As many sequences as may run share its rows, and each draws a token with all options. Raises as `warm_up` does.
    """
    config = replace(
        _without_limits(config), prefix_sharing=False, max_waiting=max(config.max_waiting, config.max_running)
    )
    num_rows = config.max_batch_tokens // config.max_running
    num_pages = config.max_running * (-(-num_rows // config.page_size) + 1)
    num_pages = max(num_pages, 4 * _PREFILL_ROWS // config.page_size)
    runner = Runner(decoder, num_pages, config.page_size, kv_dtype=kv_dtype)
    with _saying_trouble():
        _compile(runner, tokenizer, config, report)
        _run_once(runner, tokenizer, config)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(decoder.device)
        before = torch.cuda.memory_allocated(decoder.device)
        engine = Engine(runner, tokenizer, config, recovers=False, copy_out_below=0.0)
        for index in range(config.max_running):
            _submit(runner, engine, f"{index}", num_rows, replace(_ALL_OPTIONS, max_tokens=1))
        while engine.has_work:
            engine.step()
        found = torch.cuda.max_memory_allocated(decoder.device) - before
    runner.close()
    del engine, runner
    gc.collect()  # an engine and its parts know each other: the small pool would count as in use
    torch.cuda.empty_cache()
    return found


def _without_limits(config: EngineConfig) -> EngineConfig:
    return replace(config, max_context=None)


@contextmanager
def _saying_trouble() -> Iterator[None]:
    """Turn what Triton cannot do into a `ConfigError`."""
    try:
        yield
    except Exception as error:
        if (trouble := triton_trouble(error)) is None:
            raise
        raise ConfigError(f"engine.device: {trouble}; engine.device: cpu needs no Triton") from None


def _compile(runner: Runner, tokenizer: Tokenizer | None, config: EngineConfig, report: Progress) -> None:
    if runner.device.startswith("cuda") and (precompile := triton_module("precompile")) is not None:
        variants = variants_of(runner, tokenizer, config)
        try:
            precompile.compile_all(variants, lambda share: report("kernels", share))
        except precompile.CompileError as error:
            if not any(variant.kernel == "wide_kernel" for variant in variants):
                raise
            triton_module("backend").give_up_wide(str(error))  # others do what it does, only slower
            precompile.compile_all(variants_of(runner, tokenizer, config), lambda share: report("kernels", share))


def _run_once(runner: Runner, tokenizer: Tokenizer | None, config: EngineConfig) -> None:
    """Run a greedy and a drawn request."""
    with runner.no_trace():
        engine = Engine(runner, tokenizer, config, recovers=False, copy_out_below=0.0)
        for name, sampling in (("greedy", _GREEDY), ("drawn", _ALL_OPTIONS)):
            _submit(runner, engine, name, _NUM_ROWS, sampling)
        while engine.has_work:
            engine.step()


def variants_of(runner: Runner, tokenizer: Tokenizer | None, config: EngineConfig) -> list[Variant]:
    """List what the runner's launches need: prefills, decodes, alone and several, and all kinds of draws."""
    recorder = Recorder(runner)
    with runner.no_trace():
        engine = Engine(recorder, tokenizer, config, copy_out_below=0.0)  # type: ignore[arg-type]
        # Three at first, which leaves a row of padding, at last one.
        for name, num_output in (("long", 4), ("short", 2), ("twin", 2)):
            _submit(runner, engine, name, _PREFILL_ROWS, replace(_GREEDY, max_tokens=num_output))
        while engine.has_work:
            engine.step()
    return list(recorder.variants.values())


class Recorder:
    """A runner whose launches are recorded and do not run. Every token is 0: nothing follows from what is undefined."""

    runs_ahead = False  # what is drawn is not on the device

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.variants: dict[str, Variant] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, inputs: StepInputs | None) -> torch.Tensor:
        if inputs is None:
            return self._runner.forward(None)
        from mneme.kernels.triton.precompile import recorded

        with recorded() as found:
            logits = self._runner.launch(inputs)
            for temperature, top_p in _DRAWS:
                same = [0.0] * len(logits)
                draw_tokens(
                    logits,
                    temperature=[temperature] * len(logits),
                    top_k=[0] * len(logits),
                    top_p=[top_p] * len(logits),
                    min_p=same,
                    uniform=same,
                )
        self.variants |= {repr(variant[:]): variant for variant in found}
        return torch.zeros(inputs.num_sampled, self._runner.vocab_size)


def _submit(runner: Runner, engine: Engine, name: str, num_rows: int, sampling: SamplingParams) -> None:
    """Submit a prompt of so many rows, or of those that there is room for."""
    num_rows = min(num_rows, runner.num_pages * runner.page_size // 4, runner.max_context - _NUM_OUTPUT)
    if num_rows > 0:
        ids = tuple(index % runner.vocab_size for index in range(num_rows))
        name = f"warm-up-{name}"
        engine.submit(GenerationRequest(request_id=name, prompt_token_ids=ids, sampling=sampling))
