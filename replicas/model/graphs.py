"""Steps as CUDA graphs: hundreds of launches become one.

A step is padded to a bucket of rows: 1, 2, 4, 8, ..., be they decodes or rows of prompts, and its sampled rows to a
bucket of their own. Its inputs lie in buffers that never move, and the plan's data in the attention backend's own. When
a shape of launches is met for the second time it is captured, from then on replayed. A shape is both buckets and what
the attention backend says its launches depend on; where that changes, as when a buffer had to grow, the step has
another shape, so no graph outlives what it points to.

Padding rows write to the spare slot and belong to sequences without pages: they see nothing, and nobody reads them.
Whatever cannot be captured runs as it is: more rows than the largest bucket, a backend that cannot tell, a step that
waits for pages on their way, writes keys at other positions, recomputes documents or is read or observed (ask for no
bucket then: padding would be for nothing).

A step that completes chunks for the cache tier is replayed like any other: saves read pages, not activations, so they
begin when it has run (`ChunkSaver.end`). What is captured never tells them of a layer.

A capture that fails costs that step its graph and no more: it is counted, runs as it is, and captures wait for some
steps. After several failures in a row nothing is captured any more; the graphs that there are go on.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from mneme.kernels.attention import Plan
from mneme.kernels.page_table import IntArray
from mneme.kernels.triton.modules import triton_trouble
from mneme.kernels.upload import upload
from mneme.primitives import Bounded
from mneme.replicas.model.decoder import Decoder, KvPool, StepInputs

logger = logging.getLogger(__name__)

MAX_BUCKET = 512  # rows; larger steps are bound by computing, not by launches
_LEAST_SAMPLED = 32  # that sampled rows are padded to where there are as many rows: the head reads its weights as fast
_MAX_GRAPHS = 96  # each keeps a few MB of the driver's memory; the least recently used goes
_MAX_MET = 1024  # shapes met once that are remembered
_MAX_FAILURES = 3  # captures in a row
_RETRY_STEPS = 100  # that could have been captured and are not, after a failure; ten times as many after the next

Run = Callable[[StepInputs], torch.Tensor]  # logits float32 [rows that sample, vocab]
Stage = Callable[[Plan], Hashable | None]


MakeGraphs = Callable[[Run, KvPool], "StepGraphs"]


class Graph(Protocol):
    """Launches that were recorded."""

    def replay(self) -> None: ...


class Shape(NamedTuple):
    """Holds what a captured step's launches depend on."""

    num_rows: int
    num_sampled: int
    attention: Hashable


class StepGraphs:
    """Captures and replays the steps of one runner."""

    def __init__(
        self,
        run: Run,
        stage: Stage,
        capture: Callable[[Callable[[], None]], Graph],
        *,
        max_rows: int,
        max_sampled: int,
        vocab_size: int,
        device: torch.device,
        max_graphs: int = _MAX_GRAPHS,
    ) -> None:
        """
        run      the forward pass; launches the same work for inputs of one shape, and waits for nothing
        stage    brings a plan's data to where launches find it and says what they depend on; None: cannot be captured
        capture  records what a function launches
        """
        self._run, self.stage, self._capture = run, stage, capture
        self.max_rows = min(bucket_of(max_rows), MAX_BUCKET)
        self._max_sampled = min(max(bucket_of(max_sampled), _LEAST_SAMPLED), self.max_rows)
        self._vocab_size = vocab_size
        self._max_graphs = max_graphs
        # Token ids, positions, slots, sources and sampled rows.
        self._packet = torch.zeros(5 * self.max_rows, dtype=torch.int64, device=device)
        self._logits: torch.Tensor | None = None
        self._met = Bounded[Shape, None](_MAX_MET)
        self._graphs: OrderedDict[Shape, Graph] = OrderedDict()
        self._inputs: StepInputs | None = None  # what the buffers hold
        self._num_failures = 0  # since the last capture that succeeded
        self._put_off = 0  # steps without a capture
        self.num_replays = self.num_failed = 0
        self.has_captured = False  # in the last step

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def is_on(self) -> bool:
        """Return whether steps are still captured."""
        return self._num_failures < _MAX_FAILURES

    def stats(self) -> dict[str, int]:
        """Return counters for metrics."""
        return {"replays": self.num_replays, "failed": self.num_failed, "off": int(not self.is_on)}

    def bucket(self, num_rows: int, num_sampled: int) -> int | None:
        """The rows that a step of so many is padded to; None if it is not to be."""
        has_graphs = self.is_on or bool(self._graphs)
        fits = 0 < num_rows <= self.max_rows and num_sampled <= self._max_sampled
        return bucket_of(num_rows) if has_graphs and fits else None

    def inputs(
        self, arrays: Sequence[IntArray], plan: Plan, num_rows: int, draws: torch.Tensor | None = None
    ) -> StepInputs:
        """Put a step's inputs into the buffers of its bucket of `num_rows`, which the next step overwrites.

        arrays  token ids, positions, slots and sources of every row, and sampled rows
        draws   see `fill_in`, of which the sources are; None: all token ids are known
        """
        num_sampled = len(arrays[-1])
        # Few buckets of sampled rows, so that fewer shapes occur; a step that only decodes has that of its rows.
        sampled_bucket = min(num_rows, max(bucket_of(max(num_sampled, 1)), _LEAST_SAMPLED))
        sizes = [*[num_rows] * 4, sampled_bucket]
        packet = np.zeros(sum(sizes), np.int64)
        for part, array in zip(np.split(packet, np.cumsum(sizes)[:-1]), arrays, strict=True):
            part[: len(array)] = array
        on_device = self._packet[: len(packet)].copy_(upload(packet, self._packet.device), non_blocking=True)
        token_ids, positions, slots, sources, sampled_rows = torch.split(on_device, sizes)
        if draws is not None:
            rows = slice(0, len(arrays[0]))
            fill_in(token_ids[rows], sources[rows], draws)
        self._inputs = StepInputs(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            sampled_rows=sampled_rows,
            plan=plan,
            num_sampled=num_sampled,
        )
        return self._inputs

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits of a step, with those of padding rows; the next step may overwrite them."""
        self.has_captured = False
        # A replay waits for no load, reads what lies in the buffers alone, and nobody sees what it computes on the way.
        special = (inputs.load, inputs.key_positions, inputs.observe, inputs.fusor, inputs.read)
        is_plain = all(each is None for each in special)
        can_replay = inputs is self._inputs and is_plain
        attention = self.stage(inputs.plan) if can_replay else None
        if attention is None:
            return self._run(inputs)
        shape = Shape(len(inputs.token_ids), len(inputs.sampled_rows), attention)
        if shape not in self._graphs and not self._try_capture(shape):
            return self._run(inputs)
        self._graphs.move_to_end(shape)
        self._graphs[shape].replay()
        self.num_replays += 1
        return self._logits_of(shape.num_sampled)

    def _try_capture(self, shape: Shape) -> bool:
        """Capture a shape that was met before; whether it has a graph now. One that is new is only noted."""
        if shape not in self._met:
            self._met[shape] = None
            return False
        if not self.is_on or self._put_off:
            self._put_off = max(self._put_off - 1, 0)
            return False
        self.has_captured = True
        self._logits_of(shape.num_sampled)  # outside the graph's memory, which the next graph uses too
        try:
            self._graphs[shape] = self._capture(self._step)
        except Exception as error:  # Triton's are no RuntimeErrors; the step runs as it is, and may fail there for good
            self.num_failed += 1
            self._put_off = _RETRY_STEPS * 10**self._num_failures
            self._num_failures += 1
            what = f"tried again in {self._put_off} steps" if self.is_on else "no step is captured from now on"
            reason = triton_trouble(error) or error
            logger.warning("a step of %s rows could not be captured, %s: %s", shape.num_rows, what, reason)
            return False
        self._num_failures = 0
        if len(self._graphs) > self._max_graphs:
            evicted, _ = self._graphs.popitem(last=False)
            self._met.pop(evicted, None)
        logger.debug("captured a step rows=%s graphs=%s", shape.num_rows, len(self._graphs))
        return True

    def _step(self) -> None:
        """Run what is captured: the forward pass, with its logits copied to where every graph leaves them."""
        assert self._inputs is not None
        logits = self._run(replace(self._inputs, layer_done=None))  # a capture runs it twice, and computes nothing
        self._logits_of(len(logits)).copy_(logits)

    def _logits_of(self, num_sampled: int) -> torch.Tensor:
        """float32 [num_sampled, vocab], the same memory for all graphs."""
        if self._logits is None:
            self._logits = torch.zeros(self._max_sampled, self._vocab_size, device=self._packet.device)
        return self._logits[:num_sampled]


class CudaCapture:
    """Captures on a side stream into one pool of memory for all graphs.

    One pool is right because a graph's results are copied out before another graph runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], None]) -> Graph:
        """Record what `run` launches; it runs once before, so that kernels and workspaces of libraries are there.

        Raises what `run` raises, and RuntimeError if it cannot be captured; the next capture may succeed.
        """
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    run()
            finally:  # what it launched before it failed, too
                current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads may use CUDA meanwhile.
                with (
                    _no_collection(),
                    torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
                ):
                    run()
            except BaseException:
                self._recover(current)
                raise
        return graph

    def _recover(self, current: torch.cuda.Stream) -> None:
        """Put right what torch leaves as it was in the midst of a capture that failed.

        The side stream stays current if the capture cannot even be ended. torch before 2.13 then also takes the pool
        for one that is being captured into, for good: it neither empties its cache nor captures into this pool again.
        Graphs captured before keep the old pool.
        """
        torch.cuda.set_stream(current)
        with contextlib.suppress(RuntimeError):  # it was ended
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage: a kernel among it would unload its module, which ends a capture."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def fill_in(token_ids: torch.Tensor, sources: torch.Tensor, draws: torch.Tensor) -> None:
    """Put tokens that were drawn on the device, and that the host may not know yet, in their places.

    token_ids  int64 [T]  written in place
    sources    int64 [T]  the draw that a row's token is; below 0 where the token is known
    draws      int32 [S]  -1 where nothing could be drawn: such a row computes something, which nobody uses
    """
    drawn = draws.index_select(0, sources.clamp(min=0)).clamp(min=0)
    token_ids.copy_(torch.where(sources < 0, token_ids, drawn))


def step_graphs_for(decoder: Decoder, max_sampled: int) -> MakeGraphs | None:
    """Say how graphs of a decoder's steps that sample so many rows at most are made; None where there can be none."""
    if decoder.device.type != "cuda":
        return None
    try:
        from mneme.kernels.triton.backend import stage
    except ImportError:  # said by whoever needs it to attend
        return None

    def make(run: Run, pool: KvPool) -> StepGraphs:
        return StepGraphs(
            run,
            lambda plan: stage(plan, pool.slot_position, decoder.dtype, decoder.rope.num_positions),
            CudaCapture(decoder.device),
            max_rows=MAX_BUCKET,
            max_sampled=max_sampled,
            vocab_size=decoder.config.vocab_size,
            device=decoder.device,
        )

    return make


def bucket_of(num_rows: int) -> int:
    """The least power of two that is not below a positive number."""
    return 1 << (num_rows - 1).bit_length()
