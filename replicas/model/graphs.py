"""Steps as CUDA graphs: hundreds of launches become one.

A step is padded to a bucket of rows, be they decodes or rows of prompts, and its sampled rows to one of two. Its inputs
lie in buffers that never move, and the plan's data in the attention backend's own. A shape is both buckets and how the
attention backend launches, of which there are few kinds, whatever the plan: so all shapes are captured before there is
traffic (`capture_all`), and none in it.

Padding rows write to the spare slot and belong to sequences without pages: they see nothing, and nobody reads them.
Whatever has no graph runs as it is: more rows than the largest bucket, a plan that outgrows the backend's buffers, a
step that waits for pages on their way, writes keys at other positions, recomputes documents or is read or observed (ask
for no bucket then: padding would be for nothing).

A step that completes chunks for the cache tier is replayed like any other: saves read pages, not activations, so they
begin behind its launch (`KvConnector.save_launched`). What is captured never tells them of a layer.

A capture that fails is counted, and its steps run as they are; after several in a row no other is tried.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from mneme.kernels.attention import Plan
from mneme.kernels.page_table import IntArray
from mneme.kernels.triton.modules import triton_trouble
from mneme.kernels.upload import upload_into
from mneme.replicas.model.decoder import Decoder, KvPool, StepInputs
from mneme.replicas.model.parts import can_group

logger = logging.getLogger(__name__)

# Rows. A prompt's step has 400 launches, whose thread shares its interpreter with streams and savers: served, 512 rows
# took 130 ms on an H100 that has computed them in 15.
MAX_BUCKET = 2048
_BUCKETS: list[int] = [
    1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 1024, 64),
    *range(1024, MAX_BUCKET + 1, 128),
]  # fmt: skip
_FEW_SAMPLED = 128  # that sampled rows are padded to if no more are wanted: the head reads its weights as fast
_MAX_FAILURES = 3  # captures in a row
_CAPTURE_S = 60.0  # a capture takes about 0.1 s; what is not reached runs as it is

Run = Callable[[StepInputs], torch.Tensor]  # logits float32 [rows that sample, vocab]


MakeGraphs = Callable[[Run, KvPool], "StepGraphs"]


class Graph(Protocol):
    """Launches that were recorded."""

    def replay(self) -> None: ...


class Attention(Protocol):
    """Brings plans to where captured launches find them."""

    def reserve(self, plan: Plan) -> None:
        """Make room for a plan, the largest; what launches read stays where it is from then on."""

    def launches(self, plan: Plan) -> Sequence[Hashable]:
        """List how steps of as many rows as a plan has may be launched; each way does what those before it do, too."""

    def stage(self, plan: Plan, launch: Hashable | None = None) -> Hashable | None:
        """Bring a plan's data there and say how it is launched: as is asked, or best. None: it cannot be captured."""


class Shape(NamedTuple):
    """Holds what a captured step's launches depend on."""

    num_rows: int
    num_sampled: int
    launch: Hashable


class StepGraphs:
    """Captures and replays the steps of one runner."""

    def __init__(
        self,
        run: Run,
        attention: Attention,
        capture: Callable[[Callable[[], None]], Graph],
        *,
        max_rows: int,
        max_sampled: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """
        run      the forward pass; launches the same work for inputs of one shape, and waits for nothing
        capture  records what a function launches
        """
        self._run, self.attention, self._capture = run, attention, capture
        self.max_rows = bucket_of(min(max_rows, MAX_BUCKET))
        self._max_sampled = min(bucket_of(min(max_sampled, MAX_BUCKET)), self.max_rows)
        self._vocab_size = vocab_size
        # Token ids, positions, slots, sources and sampled rows.
        self._packet = torch.zeros(5 * self.max_rows, dtype=torch.int64, device=device)
        self._logits: torch.Tensor | None = None
        self._graphs: dict[Shape, Graph] = {}
        self._widest: dict[tuple[int, int], Graph] = {}  # rows and sampled rows -> what does every plan
        self.last_replayed: Graph | None = None
        self._inputs: StepInputs | None = None  # what the buffers hold
        self._num_failures = 0  # since the last capture that succeeded
        self.num_replays = self.num_failed = 0

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def is_on(self) -> bool:
        """Return whether captures succeed."""
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
        sizes = [*[num_rows] * 4, self._sampled_bucket(num_rows, num_sampled)]
        packet = np.zeros(sum(sizes), np.int64)
        for part, array in zip(np.split(packet, np.cumsum(sizes)[:-1]), arrays, strict=True):
            part[: len(array)] = array
        on_device = self._packet[: len(packet)]
        upload_into(on_device, packet)
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
        # A replay waits for no load, reads what lies in the buffers alone, and nobody sees what it computes on the way.
        special = (inputs.load, inputs.key_positions, inputs.observe, inputs.layer_filter, inputs.read)
        is_plain = all(each is None for each in special)
        can_replay = inputs is self._inputs and is_plain
        launch = self.attention.stage(inputs.plan) if can_replay else None
        shape = Shape(len(inputs.token_ids), len(inputs.sampled_rows), launch)
        graph = self._graphs.get(shape) or self._widest.get(shape[:2])
        if launch is None or graph is None:
            return self._run(inputs)
        graph.replay()
        self.num_replays += 1
        self.last_replayed = graph
        return self._logits_of(shape.num_sampled)

    def capture_all(
        self,
        make_inputs: Callable[[int, int], StepInputs],
        report: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Capture every shape that traffic has, the largest first, whose memory the others use too.

        make_inputs  gives those of a step of so many rows, so many of them sampled, by `inputs`
        """
        started_s = clock()
        sizes = [*self._sizes()]
        for number, (num_rows, num_sampled) in enumerate(sizes, 1):
            inputs = make_inputs(num_rows, num_sampled)
            launches = self.attention.launches(inputs.plan)
            # Where not every row is sampled there are prompts, and few plans without what the last way is for.
            for launch in launches if num_sampled == num_rows else launches[-1:]:
                if self.is_on and clock() < started_s + _CAPTURE_S and self.attention.stage(inputs.plan, launch):
                    self._try_capture(Shape(num_rows, num_sampled, launch))
            if launches and (graph := self._graphs.get(Shape(num_rows, num_sampled, launches[-1]))) is not None:
                self._widest[num_rows, num_sampled] = graph
            report(number / len(sizes))
        logger.info("captured %s CUDA graphs in %.1f s", len(self._graphs), clock() - started_s)

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """Every number of rows and of sampled rows that steps are padded to, falling."""
        for num_rows in _BUCKETS[_BUCKETS.index(self.max_rows) :: -1]:
            most = self._sampled_bucket(num_rows, self._max_sampled)
            yield from ((num_rows, num_sampled) for num_sampled in dict.fromkeys((most, min(most, _FEW_SAMPLED))))

    def _sampled_bucket(self, num_rows: int, num_sampled: int) -> int:
        """What sampled rows of a step are padded to: few, or as many as there may be."""
        most = min(num_rows, self._max_sampled)
        return min(most, _FEW_SAMPLED) if num_sampled <= _FEW_SAMPLED else most

    def _try_capture(self, shape: Shape) -> None:
        self._logits_of(shape.num_sampled)  # outside the graph's memory, which the next graph uses too
        try:
            self._graphs[shape] = self._capture(self._step)
        except Exception as error:  # Triton's are no RuntimeErrors; the step runs as it is, and may fail there for good
            self.num_failed += 1
            self._num_failures += 1
            what = "it runs as it is" if self.is_on else "no other is tried"
            reason = triton_trouble(error) or error
            logger.warning("a step of %s rows could not be captured, %s: %s", shape.num_rows, what, reason)
        else:
            self._num_failures = 0

    def _step(self) -> None:
        """Run what is captured: the forward pass, which leaves its logits where every graph does."""
        assert self._inputs is not None
        self._run(replace(self._inputs, logits=self._logits_of(len(self._inputs.sampled_rows))))

    def _logits_of(self, num_sampled: int) -> torch.Tensor:
        """float32 [num_sampled, vocab], the same memory for all graphs."""
        if self._logits is None:
            self._logits = torch.zeros(self._max_sampled, self._vocab_size, device=self._packet.device)
        return self._logits[:num_sampled]


class CudaCapture:
    """Captures on a side stream into one pool of memory for all graphs.

    One pool is right because a graph leaves its result outside of it.
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


def step_graphs_for(decoder: Decoder, max_sampled: int, max_rows: int = MAX_BUCKET) -> MakeGraphs | None:
    """Say how graphs of a decoder's steps are made; None where there can be none.

    max_sampled, max_rows  of one step
    """
    if decoder.device.type != "cuda" or (decoder.config.experts and not can_group(decoder.device, decoder.dtype)):
        return None
    try:
        from mneme.kernels.triton import backend
        from mneme.kernels.triton.step import OwnStep
    except ImportError:  # said by whoever needs it to attend
        return None

    rope = decoder.ropes[0]  # all reach as far
    num_rope_positions = None if rope is None else rope.num_positions

    class OwnAttention:
        """Triton's, in buffers of the graphs' own."""

        def __init__(self, pool: KvPool) -> None:
            self._slot_position, self.own = pool.slot_position, OwnStep(decoder.device)
            self._kv_dtype = pool.k_pages.dtype

        def reserve(self, plan: Plan) -> None:
            with self.own:
                backend.reserve(plan, self._slot_position, decoder.dtype, self._kv_dtype)

        def launches(self, plan: Plan) -> Sequence[Hashable]:
            return backend.launches_of(plan, decoder.device, decoder.dtype, self._kv_dtype)

        def stage(self, plan: Plan, launch: Any = None) -> Hashable | None:
            with self.own:
                return backend.stage(
                    plan, self._slot_position, decoder.dtype, num_rope_positions, launch, self._kv_dtype
                )

    def make(run: Run, pool: KvPool) -> StepGraphs:
        attention = OwnAttention(pool)

        def run_there(inputs: StepInputs) -> torch.Tensor:
            with attention.own:
                return run(inputs)

        return StepGraphs(
            run_there,
            attention,
            CudaCapture(decoder.device),
            max_rows=max_rows,
            max_sampled=max_sampled,
            vocab_size=decoder.config.vocab_size,
            device=decoder.device,
        )

    return make


def bucket_of(num_rows: int) -> int:
    """The least bucket that holds so many rows, at most `MAX_BUCKET`."""
    return _BUCKETS[bisect_left(_BUCKETS, num_rows)]
