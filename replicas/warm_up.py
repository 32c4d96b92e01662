"""What a first request would build is built before it: a request or two run through an engine that nobody keeps.

They run on the runner that will serve, so whatever is made on first use (compiled kernels, plans, pages of weights that
are read, imports) is there afterwards. The engine around it is thrown away: no token, session, metric, cached page or
learned cost is left of them. What a device compiles or captures ahead of time belongs here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from mneme.kernels.page_table import FREE_SLOT_POSITION
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine import Engine
from mneme.replicas.request import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from mneme.replicas.runner import Runner
    from mneme.replicas.tokenizer import Tokenizer

_NUM_ROWS, _NUM_OUTPUT = 64, 4
_ALL_OPTIONS = SamplingParams(max_tokens=_NUM_OUTPUT, top_p=0.9, top_k=40, repetition_penalty=1.1, logprobs=2, seed=0)
_GREEDY = SamplingParams(max_tokens=_NUM_OUTPUT, temperature=0, seed=0)


def warm_up(runner: Runner, tokenizer: Tokenizer | None, config: EngineConfig) -> None:
    """Prefill and decode two sequences, one greedy and one drawn. No page of the runner may be in use."""
    num_rows = min(_NUM_ROWS, runner.num_pages * runner.page_size // 4, runner.max_context - _NUM_OUTPUT)
    if num_rows < 1:
        return
    with no_trace(runner):
        engine = Engine(runner, tokenizer, replace(config, max_context=None, copy_out_below=0.0))
        for name, sampling in (("greedy", _GREEDY), ("drawn", _ALL_OPTIONS)):
            ids = tuple(index % runner.vocab_size for index in range(num_rows))
            engine.submit(GenerationRequest(request_id=f"warm-up-{name}", prompt_token_ids=ids, sampling=sampling))
        while engine.has_work:
            engine.step()


@contextmanager
def no_trace(runner: Runner) -> Iterator[None]:
    """Whatever runs in here, no slot is visible afterwards and no counter of the runner has moved."""
    num_shared = runner.num_shared_segments
    try:
        yield
    finally:
        runner.pool.slot_position.fill_(FREE_SLOT_POSITION)
        runner.num_shared_segments = num_shared
