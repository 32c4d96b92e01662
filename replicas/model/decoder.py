"""The decoder's forward pass over query rows of many sequences: one algorithm, described by `DecoderConfig`.

Shapes: T query rows, S sampled rows, H hidden, Hq/Hkv query and key heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from mneme.cachetier.host_pages.streams import CudaStreams, EventSpans, Streams
from mneme.cachetier.host_pages.tier import PageLoad
from mneme.kernels.attention import Plan, QueryRows, RopeTable, attend, choose
from mneme.kernels.kv_write import write_kv
from mneme.kernels.native.backend import attend_native
from mneme.kernels.native.choice import OURS, CpuKernels
from mneme.kernels.native.layers import LayerRows, NativeLayers
from mneme.kernels.work import Share
from mneme.replicas.blend.layer_filter import LayerFilter
from mneme.replicas.model.decoder_config import DecoderConfig, RopeConfig
from mneme.replicas.model.parts import Attention, DecoderWeights, dense_layers
from mneme.replicas.model.timeline import Timeline

TRACK = "engine"  # of a timeline: the parts of forward passes


@dataclass(slots=True, kw_only=True)
class KvPool:
    """The device pool of KV pages, shared by all sequences of an engine."""

    k_pages: torch.Tensor  # dtype [layers, Hkv, num_pages, page_size, D], keys rotated at slot_position
    v_pages: torch.Tensor  # like k_pages
    slot_position: torch.Tensor  # int32 [num_pages * page_size]; FREE where nothing is stored


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """One step's query rows, the same for all layers."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int32 [T]
    slots: torch.Tensor  # int64 [T] where each row's KV is written
    sampled_rows: torch.Tensor  # int64 [S] rows whose logits are wanted
    num_sampled: int  # at most S; logits behind these are of padding
    plan: Plan
    # From these layers on, in place of `plan`: what is read differs between them. Empty in steps that are captured.
    plans: dict[int, Plan] = field(default_factory=dict)
    logits: torch.Tensor | None = None  # float32 [S, vocab] that is to hold them; None: any
    # int32 [T] where each row's key is rotated; None: at its position. Such a step is not captured.
    key_positions: torch.Tensor | None = None
    load: PageLoad | None = (
        None  # pages that the plan reads and that are still on their way; such a step is not captured
    )
    layer_done: Callable[[int], None] | None = None  # of a step that completes chunks; not called in a replay
    # Called after each layer's attention with the layer, its queries, un-rotated [T, Hq, D], and their lse, float32
    # [T, Hq]; such a step is not captured either.
    observe: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None
    layer_filter: LayerFilter | None = None  # lets rows leave between layers; nor is such a step
    # int64 [R] rows whose last hidden states, behind the norm, `read` is called with; nor is such a step.
    read_rows: torch.Tensor | None = None
    read: Callable[[torch.Tensor], None] | None = None

    def only(self, rows: torch.Tensor) -> StepInputs:
        """Return what is left for the next layers of these rows, ascending, all sampled ones among them."""
        kept = rows.cpu().numpy()
        return replace(
            self,
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            slots=self.slots[rows],
            sampled_rows=torch.searchsorted(rows, self.sampled_rows),
            plan=self.plan.with_rows(QueryRows(self.plan.sequence[kept], self.plan.position[kept])),
            key_positions=None if self.key_positions is None else self.key_positions[rows],
            read_rows=None if self.read_rows is None else torch.searchsorted(rows, self.read_rows),
        )


class Decoder:
    """Weights and rotary table of one model on one device."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        *,
        share: Share = "auto",
        max_context: int | None = None,
        kernels: CpuKernels = OURS,
    ) -> None:
        """Make a decoder.

        max_context  tokens of the longest sequence that will be run, if fewer than the model's
        kernels      who computes on a CPU: of products the weights know it
        """
        self.config = config
        self.max_context = min(config.max_context, max_context or config.max_context)
        self.share, self.kernels = share, kernels
        self._weights = weights
        # The sum over all layers has channels beyond 65504 in many models: float16 would hold an infinity there.
        self._residual = torch.float32 if self.dtype is torch.float16 else self.dtype
        tables = {rope: self._table(rope) for rope in {config.rope_of(layer) for layer in range(config.num_layers)}}
        self.ropes = [tables[config.rope_of(layer)] for layer in range(config.num_layers)]  # by layer
        self._layer_spans: LayerSpans | None = None
        dense = None if config.is_parallel else dense_layers(weights.layers, weights.norm, self.dtype)
        self._native: NativeLayers | None = None  # where compiled code knows all of a layer
        if dense is not None:
            scale, soft_cap = config.scale, config.soft_cap
            self._native = NativeLayers(dense, self.ropes, config.windows, softmax_scale=scale, soft_cap=soft_cap)

    def _table(self, rope: RopeConfig | None) -> RopeTable | None:
        if rope is None:
            return None
        frequencies, device = torch.tensor(rope.inv_freq, dtype=torch.float64), self.device
        factor = rope.attention_factor
        return RopeTable.from_inv_freq(frequencies, self.max_context, attention_factor=factor, device=device)

    def record(self, timeline: Timeline) -> None:
        """Add what each layer takes to a timeline from now on, but for steps that are replayed as CUDA graphs."""
        self._layer_spans = layer_spans(timeline, self.device)

    @property
    def device(self) -> torch.device:
        return self._weights.device

    @property
    def weight_bytes(self) -> Mapping[str, int]:
        """Bytes of matrices by format."""
        return self._weights.num_bytes

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, pool: KvPool) -> torch.Tensor:
        """Logits float32 [S, vocab]; writes the KV of every row into the pool."""
        weights, layers = self._weights, self._weights.layers
        spans = None if self._layer_spans is None else self._layer_spans.begin()
        hidden = self._embedded(inputs)
        normed = layers[0].attention_norm(hidden)
        if self._native is not None and spans is None and self._is_native(inputs):
            return self.logits(self._run_native(self._native, hidden, normed, inputs, pool), inputs.logits)
        next_norms = [layer.attention_norm for layer in layers[1:]] + [weights.norm]
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            if index in inputs.plans:
                inputs = replace(inputs, plan=inputs.plans[index])
            attended, rows, inputs = self._attend(layer.attention, index, normed, inputs, pool, spans)
            if rows is not None:
                hidden, normed = hidden[rows], normed[rows]
            if index == len(layers) - 1:  # above the last attention only sampled rows matter
                last = inputs.sampled_rows
                if inputs.read_rows is not None:  # and those that are read
                    last = torch.cat((last, inputs.read_rows))
                hidden, normed, attended = hidden[last], normed[last], attended[last]
            mixed = layer.attention.o(attended, self._residual)
            if layer.behind_attention is not None:
                mixed = layer.behind_attention(mixed)
            if self.config.is_parallel:
                normed = normed if layer.mlp_norm is None else layer.mlp_norm(hidden)
                mlp = layer.mlp(normed, self._residual) + mixed
            else:
                assert layer.mlp_norm is not None
                hidden, normed = layer.mlp_norm.add(hidden, mixed)
                mlp = layer.mlp(normed, self._residual)
            if layer.behind_mlp is not None:
                mlp = layer.behind_mlp(mlp)
            hidden, normed = next_norm.add(hidden, mlp)
            if spans is not None:
                spans.end("mlp", index)
        if inputs.read_rows is not None and inputs.read is not None:
            num_sampled = len(inputs.sampled_rows)
            inputs.read(normed[num_sampled:])
            normed = normed[:num_sampled]
        return self.logits(normed, inputs.logits)

    def _is_native(self, inputs: StepInputs) -> bool:
        """Return whether nobody looks between a layer's operations, all have one plan, and compiled code does all."""
        if (
            inputs.layer_filter is not None
            or inputs.observe is not None
            or inputs.read_rows is not None
            or inputs.plans
        ):
            return False
        rows = self.kernels.product_rows
        if rows is not None and len(inputs.token_ids) >= rows:
            return False
        return choose("auto", self.device, self.dtype, inputs.plan, self.kernels.prompt_rows) is attend_native

    def _run_native(
        self, native: NativeLayers, hidden: torch.Tensor, normed: torch.Tensor, inputs: StepInputs, pool: KvPool
    ) -> torch.Tensor:
        """Hidden states and their norm [T, H] -> those of sampled rows behind the last norm, [S, H]."""
        rows = LayerRows(
            slots=inputs.slots,
            key_positions=inputs.positions if inputs.key_positions is None else inputs.key_positions,
            sampled_rows=inputs.sampled_rows,
            k_pages=pool.k_pages,
            v_pages=pool.v_pages,
            slot_position=pool.slot_position,
            plan=inputs.plan,
        )
        run, num_layers = native.begin(hidden, normed, rows), self.config.num_layers
        if inputs.load is None and inputs.layer_done is None:
            run.run(0, num_layers)
            return run.out
        for index in range(num_layers):
            if inputs.load is not None:  # before writing too: a row may fill a page whose first slots are being loaded
                inputs.load.wait_layer(index)
            run.run(index, index + 1)
            if inputs.layer_done is not None:
                inputs.layer_done(index)
        return run.out

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Last hidden states, behind the norm [S, H] -> float32 [S, vocab], in `out` if there is one."""
        logits, cap = self._weights.head(hidden, torch.float32, out), self.config.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _embedded(self, inputs: StepInputs) -> torch.Tensor:
        """Return [T, H], scaled and with positions where the model has these; a scale is rounded as weights are."""
        weights, scale = self._weights, self.config.embedding_scale
        hidden = weights.embed(inputs.token_ids)
        if scale != 1.0:
            hidden = hidden * torch.tensor(scale, dtype=hidden.dtype).item()
        if weights.positions is not None:
            hidden = hidden + weights.positions[inputs.positions]
        return hidden.to(self._residual)

    def _attend(
        self,
        layer: Attention,
        index: int,
        hidden: torch.Tensor,
        inputs: StepInputs,
        pool: KvPool,
        spans: LayerSpans | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, StepInputs]:
        """hidden [T, H] -> [T', Hq * D] of the rows that stay, these rows (None: all), and the inputs of the rest."""
        config = self.config
        num_rows, kv_end = hidden.shape[0], config.num_q_heads + config.num_kv_heads
        heads = layer.qkv(hidden).view(num_rows, -1, config.head_dim)
        q, k, v = heads[:, : config.num_q_heads], heads[:, config.num_q_heads : kv_end], heads[:, kv_end:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        if spans is not None:
            spans.end("project", index)
        if inputs.load is not None:  # before writing too: a row may fill a page whose first slots are being loaded
            inputs.load.wait_layer(index)
            if spans is not None:
                spans.end("wait", index)
        k_pages, v_pages, rope = pool.k_pages[index], pool.v_pages[index], self.ropes[index]
        key_positions = inputs.positions if inputs.key_positions is None else inputs.key_positions
        write_kv(k, v, inputs.slots, key_positions, k_pages, v_pages, rope)
        if inputs.layer_done is not None:
            inputs.layer_done(index)
        rows = None if inputs.layer_filter is None else inputs.layer_filter.narrow(index, k, v, k_pages, v_pages, rope)
        if rows is not None:
            inputs, q = inputs.only(rows), q[rows]
        out, lse = attend(
            q, k_pages, v_pages, pool.slot_position, rope, inputs.plan,
            softmax_scale=config.scale, window=config.windows[index], soft_cap=config.soft_cap,
            prompt_rows=self.kernels.prompt_rows,
        )  # fmt: skip
        if layer.sinks is not None:  # one more term of the softmax's sum, that has no value
            out *= torch.sigmoid(lse - layer.sinks)[..., None].to(out.dtype)
            lse = torch.logaddexp(lse, layer.sinks)
        if spans is not None:
            spans.end("attend", index)
        if inputs.observe is not None:
            inputs.observe(index, q, lse)
        return out.reshape(len(q), -1), rows, inputs


class LayerSpans(Protocol):
    """Records what the parts of a forward pass take, as spans that follow each other."""

    def begin(self) -> LayerSpans | None:
        """Start the first span now; None where nothing can be timed."""

    def end(self, part: str, layer: int) -> None:
        """End the part of the layer that ran until now; the next one starts."""


class ClockSpans:
    """Reads the host's clock, for a device whose work is done when a call returns."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._start_s = 0.0

    def begin(self) -> ClockSpans:
        self._start_s = self._timeline.clock()
        return self

    def end(self, part: str, layer: int) -> None:
        now_s = self._timeline.clock()
        self._timeline.span(f"{part} layer {layer}", self._start_s, now_s, TRACK)
        self._start_s = now_s


class StreamSpans:
    """Records events in the stream that computes."""

    def __init__(self, timeline: Timeline, streams: Streams) -> None:
        self._streams = streams
        self._spans = EventSpans(timeline, streams)
        self._start = streams.current().record()

    def begin(self) -> StreamSpans | None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None  # events of a graph have no times
        self._spans.flush()
        self._start = self._streams.current().record()
        return self

    def end(self, part: str, layer: int) -> None:
        now = self._streams.current().record()
        self._spans.add(f"{part} layer {layer}", self._start, now, TRACK)
        self._start = now


def layer_spans(timeline: Timeline, device: torch.device) -> LayerSpans:
    """Return what records forward passes on this device."""
    if device.type == "cuda":
        return StreamSpans(timeline, CudaStreams(device, is_timed=True))
    return ClockSpans(timeline)
