"""Measures what things cost on this machine, before there is traffic: a tier's edges, steps, and what sharing costs.

*Edges.* Host: runs of bytes as large as a chunk are hashed, as a read of a chunk is, and copied, to the engine's device
where it has one. Disk: they are read from a scratch file in the tier's folder, which the page cache is asked to forget
first. Peers keep their defaults until they are read. These are first guesses, which soon give way to loads.

*Steps*, with the runner that will serve. A prompt is computed piece by piece, so that each piece is a point of
(rows, context); behind it, and behind short prompts, some tokens are decoded. That happens in a forest of its own over
the engine's pages, which nobody holds yet; afterwards no slot is visible and no counter of the engine has moved.

*Sharing*, on a GPU: the constants of `ShareCost`. A call's time is modelled as the sum over its pieces of what
`ShareCost` says, and two terms that do not depend on sharing; the constants are the non-negative least-squares solution
of the relative errors.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import xxhash

from mneme.cachetier.chunk.header import U8Array
from mneme.cachetier.names import CostEdge
from mneme.cachetier.policy.cost_model import SHARE_CONSTANTS, Calibration, CostFile, CostModel, Point, calibrated
from mneme.kernels.native.library import cpu_features
from mneme.kernels.page_table import FREE_SLOT_POSITION, PageTable, QueryRows, full_mask
from mneme.kernels.plan import Plan
from mneme.kernels.share_cost import FloatArray
from mneme.kernels.triton.modules import triton_module
from mneme.kernels.work import Share
from mneme.replicas.config import EngineConfig
from mneme.replicas.connector.chunk_pages import ChunkPages, ChunkTokens
from mneme.replicas.connector.device_pages import make_chunk_pages
from mneme.replicas.engine.engine import make_forest
from mneme.replicas.model.draws import SampleRow
from mneme.replicas.model.graphs import CudaCapture
from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.replicas.schedule.scheduler import Scheduler
from mneme.replicas.sequence import Sequence

if TYPE_CHECKING:
    from mneme.replicas.model.runner import Runner

logger = logging.getLogger(__name__)

_PIECES = (32, 96, 384, 2048, 2048, 64)  # rows, one after the other
_FEWEST_ROWS = 16  # of a piece behind the first, where it is shortened
_BATCH, _BATCH_CONTEXT = 8, 48  # sequences that decode together, tokens of each
_NUM_DECODES = 4  # of each batch, at most
_NUM_PASSES = 4  # at most; no pass is begun that would take longer than is left
_PIECE_SHARE = 1 / 12  # of the time
_FAR = 3.0  # times what was measured, or a part of it
_EDGE_SHARE = 0.1  # of the time
_USED_SHARE = 0.7  # of the pages
# Steps that say what sharing costs: sequences, and tokens that they share; each with and without sharing.
_SHARED = tuple(itertools.product((2, 8, 32), (128, 512, 1024, 1536)))
_SHARES: tuple[Share, ...] = ("always", "never")
_SHARE_ERROR = 0.25  # in the median: beyond it the times do not follow the model
_NUM_REPLAYS = 5
_GREEDY = SamplingParams(temperature=0, seed=0)

_SHARE_TERMS = ("key_few", "head_few", "key_many", "head_many", "piece", "merge", "cold", "call")
# Reads of an edge: how many, and the share of all bytes that each has: so that bytes and chunks can be told apart.
_READS = ((1, 1 / 64), (1, 1 / 8), (8, 1 / 8), (1, 1.0), (8, 1 / 64))
_CHUNKS = 8  # that all bytes together are
_MAX_BYTES = 32 << 20  # of them
_HEADER_BYTES = 4096  # of a chunk, read on their own

Bring = Callable[[U8Array], object]
Read = Callable[[int, int], object]  # start and end, in bytes
Step = tuple[list[tuple[int, int]], float]  # (rows, context) of each sequence, seconds


def remembered_costs(
    runner: Runner,
    config: EngineConfig,
    file: CostFile,
    *,
    chunk_tokens: int = 256,
    disk_folder: Path | None = None,
    budget_s: float = 5.0,
) -> CostModel:
    """The cost model that an earlier start has left, or a new one, which is left to the next.

    One whose steps have turned out far from what was measured, on a machine that was busy then, is measured again.
    """
    found = file.read()
    is_near = found is not None and all(1 / _FAR <= scale <= _FAR for scale in found.step_scales)
    was_kept = is_near and file.share_cost is not None
    if not was_kept:
        file.share_cost = _share_cost_here(runner)
    runner.share_cost = replace(runner.share_cost, **file.share_cost or {})
    if found is not None and is_near:
        if not was_kept and file.share_cost is not None:
            file.write(found)
        return found
    started_s = time.perf_counter()
    calibration = calibrate(runner, config, chunk_tokens=chunk_tokens, disk_folder=disk_folder, budget_s=budget_s)
    costs = CostModel(calibration)
    logger.info("measured costs in %.1f s: %s", time.perf_counter() - started_s, calibration)
    file.write(costs)
    return costs


def measured_share_cost(runner: Runner, time_s: Callable[[Plan, Callable[[], None]], float]) -> dict[str, float] | None:
    """Fit the constants of `ShareCost` that kernels for a GPU have, with the heads, pages and layers that will serve.

    time_s  of a step's attention alone, in all layers: its plan, and what runs it

    None where the pool or the model's context has no room for the steps, or where their times do not follow the model.
    No page is in use, before and afterwards.
    """
    position, page_size = runner.pool.slot_position, runner.page_size
    num_shared = max(num_tokens for _, num_tokens in _SHARED) // page_size
    num_pages = num_shared + max(batch for batch, _ in _SHARED)
    end = num_shared * page_size  # where each sequence's own page stands
    if num_pages > runner.num_pages or end + page_size >= runner.max_context:
        return None
    places = torch.arange(end + page_size, dtype=torch.int32, device=position.device)
    position[:end] = places[:end]
    position[end : num_pages * page_size] = places[end:].repeat(num_pages - num_shared)
    features, picoseconds = list[list[float]](), list[float]()
    try:
        for batch, num_tokens in _SHARED:
            rows = QueryRows(np.arange(batch), np.full(batch, end + page_size))
            shared = range(num_tokens // page_size)
            tables = [_table([*shared, num_shared + index], page_size) for index in range(batch)]
            for share in _SHARES:
                plan, run = runner.attention_of(tables, rows, share)
                features.append(features_of(plan))
                picoseconds.append(time_s(plan, run) * 1e12 / runner.num_layers)
    finally:
        position[: num_pages * page_size] = FREE_SLOT_POSITION
    constants, error = fitted(features, picoseconds)
    logger.info("constants of sharing: %s, median error %.3f", constants, error)
    if error > _SHARE_ERROR or not constants["key_many"]:
        return None
    return {name: constants[name] for name in SHARE_CONSTANTS}


def _table(page_ids: list[int], page_size: int) -> PageTable:
    return PageTable(
        np.array(page_ids, np.int32),
        np.zeros(len(page_ids), np.int32),
        np.full(len(page_ids), full_mask(page_size), np.int64),
    )


def _share_cost_here(runner: Runner) -> dict[str, float] | None:
    """Measure it on a GPU; None on a CPU, and where it fails: then those that kernels come with hold."""
    device = runner.pool.k_pages.device
    if device.type != "cuda" or (steps := triton_module("step")) is None:
        return None
    capture = CudaCapture(device)

    def time_s(_plan: Plan, run: Callable[[], None]) -> float:
        with steps.OwnStep(device):
            graph = capture(run)
            times = list[float]()
            for _ in range(_NUM_REPLAYS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1000)
        return min(times)

    try:
        with torch.inference_mode(), torch.cuda.device(device):
            return measured_share_cost(runner, time_s)
    except RuntimeError as error:  # no memory, or a capture that failed; whatever else is wrong, warm-up says
        logger.warning("constants of sharing are those of an H100, they cannot be measured here: %s", error)
        return None


def features_of(plan: Plan) -> list[float]:
    """Sum over the pieces of a plan what each constant is multiplied with, in the order of `fitted`'s constants.

    The last two do not depend on sharing: elements that come from memory the first time that they are read, and what a
    call costs whatever it does.
    """
    work, width, group = plan.work, plan.num_kv_heads * plan.head_dim, plan.num_q_heads // plan.num_kv_heads
    few, many, merge = [0.0, 0.0], [0.0, 0.0], 0.0
    for piece in range(work.num_pieces):
        rows = int(work.row_begin[piece + 1] - work.row_begin[piece])
        runs = slice(work.run_begin[piece], work.run_begin[piece + 1])
        elements = int((work.page_end[runs] - work.page_begin[runs]).sum()) * plan.page_size * width
        if rows * group < plan.cost.many_heads:  # a pass for each row
            few[0] += elements * rows
            few[1] += elements * rows * group
        else:
            many[0] += elements
            many[1] += elements * rows * group
        merge += rows * group * width
    distinct = len({int(page) for table in plan.page_tables for page in table.page_ids}) * plan.page_size * width
    return [*few, *many, work.num_pieces * plan.num_kv_heads, merge, distinct, 1.0]


def fitted(features: list[list[float]], picoseconds: list[float]) -> tuple[dict[str, float], float]:
    """Return the constants by name, and the median relative error of the model with them."""
    matrix, times = np.array(features), np.array(picoseconds)
    constants = _non_negative_fit(matrix / times[:, None], np.ones(len(times)))
    error = float(np.median(np.abs(matrix @ constants / times - 1)))
    return dict(zip(_SHARE_TERMS, constants.tolist(), strict=True)), error


def _non_negative_fit(matrix: FloatArray, wanted: FloatArray, num_steps: int = 50_000) -> FloatArray:
    """Least squares under x >= 0, by projected gradient on scaled columns."""
    scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    scaled = matrix / scale
    step = 1 / np.linalg.norm(scaled, 2) ** 2
    x = np.zeros(matrix.shape[1])
    for _ in range(num_steps):
        x = np.maximum(0.0, x - step * (scaled.T @ (scaled @ x - wanted)))
    found: FloatArray = x / scale
    return found


def machine_of(runner: Runner, config: EngineConfig) -> str:
    """Digest all that a step's duration depends on beside the model."""
    device = runner.pool.slot_position.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_features()
    settings = (config.max_batch_tokens, runner.page_size, torch.get_num_threads(), os.cpu_count())
    return blake2b(f"{name} {settings}".encode(), digest_size=16).hexdigest()


def calibrate(
    runner: Runner,
    config: EngineConfig,
    *,
    chunk_tokens: int = 256,
    disk_folder: Path | None = None,
    budget_s: float = 5.0,
) -> Calibration:
    """Measure before the first request: all pages are free, and are so again. `disk_folder`: of the tier's files."""
    pool = runner.pool
    assert bool((pool.slot_position == FREE_SLOT_POSITION).all()), "nothing may be in the pool"
    num_layers, num_kv_heads, _, _, head_dim = pool.k_pages.shape
    token_bytes = 2 * num_layers * num_kv_heads * head_dim * pool.k_pages.element_size()
    bring = None
    if pool.k_pages.device.type != "cpu":
        pages = make_chunk_pages(pool, chunk_tokens * token_bytes // num_layers)
        bring = bringing(pages, chunk_tokens, token_bytes // num_layers, runner.page_size)
    edges = measured_edges(chunk_tokens * token_bytes, disk_folder, bring=bring, budget_s=_EDGE_SHARE * budget_s)
    with runner.no_trace():
        steps = measured_steps(runner, config, (1 - _EDGE_SHARE) * budget_s)
    return calibrated(steps, edges, step_rows=config.max_batch_tokens, kv_bytes_per_token=token_bytes)


def measured_edges(
    chunk_bytes: int,
    disk_folder: Path | None = None,
    *,
    bring: Bring | None = None,
    budget_s: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[CostEdge, list[Point]]:
    """Points with the terms (1, chunks, bytes); an edge that cannot be measured is not there.

    `bring`: takes what was read to the device; None: it is copied within this memory. `budget_s`: nothing is begun
    after it.
    """
    until_s = clock() + budget_s
    content = np.random.default_rng(0).bytes(min(_CHUNKS * chunk_bytes, _MAX_BYTES))
    buffer = memoryview(bytearray(content))

    def read_host(start: int, end: int) -> None:
        if bring is None:
            buffer[start:end] = content[start:end]
        else:
            bring(np.frombuffer(content, np.uint8)[start:end])
        xxhash.xxh3_128_digest(buffer[start:end])

    read_host(0, len(content))
    edges: dict[CostEdge, list[Point]] = {"host": _measure(read_host, len(content), until_s, clock)}
    if disk_folder is not None and clock() < until_s:
        try:
            edges["disk"] = _measured_disk(content, buffer, disk_folder, until_s, clock)
        except OSError as error:
            logger.warning("the disk's speed is a guess, %s cannot be written and read: %s", disk_folder, error)
    return {edge: points for edge, points in edges.items() if points}


def _measured_disk(
    content: bytes, buffer: memoryview, folder: Path, until_s: float, clock: Callable[[], float]
) -> list[Point]:
    """The file has no name, so nothing is left of it whatever happens."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        fd, view = file.fileno(), memoryview(content)
        step = max(len(content) // _CHUNKS, 1)
        for start in range(0, len(content), step):
            _write(fd, view[start : start + step])
            if clock() > until_s:  # too slow even to be asked
                return []
        os.fsync(fd)

        def forget() -> None:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

        def read(start: int, end: int) -> None:
            os.preadv(fd, [buffer[start : min(start + _HEADER_BYTES, end)]], start)
            at = start
            while at < end:
                count = os.preadv(fd, [buffer[at:end]], at)
                if not count:
                    raise OSError("the file is shorter than what was written")
                at += count
            xxhash.xxh3_128_digest(buffer[start:end])

        return _measure(read, len(content), until_s, clock, before=forget)


def _write(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]


def _measure(
    read: Read, num_bytes: int, until_s: float, clock: Callable[[], float], before: Callable[[], object] | None = None
) -> list[Point]:
    points: list[Point] = []
    for count, share in _READS:
        if points and clock() > until_s:
            break
        if before is not None:
            before()
        size = max(int(share * num_bytes), 1)
        started_s = clock()
        for index in range(count):
            read(index * size, (index + 1) * size)
        points.append(Point((1, count, count * size), max(clock() - started_s, 1e-9)))
    return points


def bringing(pages: ChunkPages, chunk_tokens: int, token_bytes: int, page_size: int) -> Callable[[U8Array], None]:
    """Do what a load does with bytes that were read, layer by layer; they go to the spare page, which nobody sees.

    token_bytes  of one layer

    By one thread, so a load, which has several, turns out faster than this.
    """

    def bring(data: U8Array) -> None:
        num_tokens = min(chunk_tokens, len(data) // token_bytes)
        if not num_tokens:
            return
        first = np.arange(0, num_tokens, page_size)
        runs = np.stack([0 * first, 0 * first, np.minimum(page_size, num_tokens - first), first], 1)
        (batch,) = pages.batches([ChunkTokens(num_tokens, runs)])
        size, event = num_tokens * token_bytes, None
        for start in range(0, len(data) - size + 1, size):
            batch.begin()
            batch.put(0, data[start : start + size])
            event = batch.scatter(0, None)
        if event is not None:
            event.wait()

    return bring


def measured_steps(
    runner: Runner, config: EngineConfig, budget_s: float, clock: Callable[[], float] = time.perf_counter
) -> list[Step]:
    """Keep the fastest of each piece over all passes: whatever else the machine does only makes them slower."""
    started_s = clock()
    plan: _Plan | None = None
    fastest: dict[tuple[tuple[int, int], ...], float] = {}
    longest_s = 0.0  # of a pass
    for number in range(_NUM_PASSES):
        pass_started_s = clock()
        if number and pass_started_s + longest_s > started_s + budget_s:
            break
        bench = _Bench(runner, config, clock, random.Random(number), budget_s * _PIECE_SHARE)
        plan = bench.run(plan)
        longest_s = max(longest_s, clock() - pass_started_s)
        for sequences, seconds in bench.steps:
            shape = tuple(sequences)
            fastest[shape] = min(fastest.get(shape, seconds), seconds)
    return [([*shape], seconds) for shape, seconds in fastest.items()]


class _Plan(NamedTuple):
    """Holds what one pass has measured, and others repeat."""

    pieces: list[int]  # rows of each piece of a prompt
    context_by_batch: dict[int, int]  # tokens of each prompt that is decoded behind, by how many there are


class _Bench:
    """One pass over a forest of its own."""

    def __init__(
        self, runner: Runner, config: EngineConfig, clock: Callable[[], float], draw: random.Random, piece_s: float
    ) -> None:
        """`piece_s`: what a piece, or the prompts of a batch, may take."""
        self.steps: list[Step] = []
        self._runner, self._clock, self._draw, self._piece_s = runner, clock, draw, piece_s
        self._row_s = 0.0  # of the last piece
        self._forest = make_forest(runner, replace(config, prefix_sharing=True), clock, copy_out_below=0.0)
        self._scheduler = Scheduler(
            self._forest, max_batch_tokens=config.max_batch_tokens, max_running=config.max_running
        )
        num_room = min(runner.max_context, int(runner.num_pages * runner.page_size * _USED_SHARE))
        self._num_room = num_room - _NUM_DECODES - 1
        self._max_rows, self._max_batch = config.max_batch_tokens, min(_BATCH, config.max_running)

    def run(self, plan: _Plan | None) -> _Plan:
        """Measure what an earlier pass did, or, the first time, as much as fits."""
        pieces = self._prefill(None if plan is None else plan.pieces)
        contexts = self._contexts() if plan is None else plan.context_by_batch
        for batch, context in contexts.items():
            self._forest.clear()
            self._decode([self._drawn(context) for _ in range(batch)])
        return _Plan(pieces, contexts)

    def _prefill(self, pieces: list[int] | None) -> list[int]:
        """Compute one prompt by pieces, then decode behind all of it; returns the rows of each piece."""
        ids, done = list[int](), list[int]()
        for wanted in pieces or _PIECES:
            affordable = wanted if pieces or not done else self._affordable()
            num_rows = max(min(wanted, self._max_rows, self._num_room - len(ids), affordable), 1)
            if done and num_rows < min(_FEWEST_ROWS, wanted):
                continue
            ids += self._drawn(num_rows)
            sequence = self._begin(ids)
            self.steps.append(self._step())
            self._scheduler.remove(sequence)
            self._row_s = self.steps[-1][1] / num_rows
            done.append(num_rows)
        self._decode([ids])
        return done

    def _contexts(self) -> dict[int, int]:
        """Choose what is decoded: a batch behind short prompts, if there is time for them, and one sequence alone."""
        found = {}
        for batch in {self._max_batch, 1}:
            room = min(self._affordable() // batch, self._num_room // batch - self._runner.page_size)
            context = min(_BATCH_CONTEXT, self._max_rows, room)
            if context > 0:
                found[batch] = context
        return found

    def _affordable(self) -> int:
        """Count the rows that take no longer than a piece may."""
        return int(self._piece_s / max(self._row_s, 1e-9))

    def _decode(self, prompts: list[list[int]]) -> None:
        """Measure a few steps, fewer if they are slow; the first makes the plan of the others."""
        sequences = [self._begin(ids) for ids in prompts]
        while any(sequence.num_output == 0 for sequence in sequences):
            self._step()
        measured = [self._step(), self._step()]
        while len(measured) < _NUM_DECODES and sum(seconds for _, seconds in measured) < self._piece_s:
            measured.append(self._step())
        self.steps.append((measured[0][0], min(seconds for _, seconds in measured[1:])))
        for sequence in sequences:
            self._scheduler.remove(sequence)

    def _step(self) -> Step:
        """Run a step as `Engine.step` does, and wait for the device."""
        started_s = self._clock()
        batch = self._scheduler.schedule()
        inputs = self._runner.prepare(batch, self._forest.store.drain_moves(can_copy=False))
        logits = self._runner.forward(inputs)
        sampling = [part.sequence for part in batch if part.samples]
        sampled = self._runner.sample(
            logits, [SampleRow(_GREEDY, 0, 0, sequence.num_output) for sequence in sampling]
        ).wait()
        if logits.device.type == "cuda":
            torch.cuda.synchronize(logits.device)
        seconds = self._clock() - started_s
        for sequence, outcome in zip(sampling, sampled, strict=True):
            sequence.append(outcome.token_id or 0)
        return [(part.num_rows, part.spans[0][0]) for part in batch], seconds

    def _begin(self, ids: list[int]) -> Sequence:
        sequence = Sequence(
            request=GenerationRequest(request_id="calibration", prompt_token_ids=(), sampling=_GREEDY),
            ids=list(ids),
            num_prompt=len(ids),
            max_tokens=_NUM_DECODES + 1,
            arrival=0,
        )
        self._scheduler.add(sequence)
        return sequence

    def _drawn(self, num_tokens: int) -> list[int]:
        return [self._draw.randrange(self._runner.vocab_size) for _ in range(num_tokens)]
