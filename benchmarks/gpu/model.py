"""A model of random weights on a device, and engines over it; no files, no tokenizer, no Ray."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from random_models import head_weights, kv_bytes_per_token, layer_weights, make_decoder

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.graphs import step_graphs_for
from mneme.replicas.model.runner import Runner
from mneme.replicas.request import GenerationRequest, SamplingParams

_WARM_STEPS = 4  # after the last prefill: the first decode steps of a batch size may compile and record
_SPARE_PAGES = 64


class Prompts(NamedTuple):
    name: str
    shared: int
    private: int


class Model:
    """One model with a pool that holds `max_batch` requests with any of these prompts and so many new tokens."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_batch: int,
        prompts: tuple[Prompts, ...],
        num_steps: int,
        longest: int = 0,  # prompt that comes alone
        num_host_pages: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.decoder = make_decoder(name, device=device, dtype=dtype, max_position_embeddings=4096)
        self.config = self.decoder.config
        self.dtype, self._max_batch = dtype, max_batch
        self._ids = torch.Generator().manual_seed(0)
        self.page_size = EngineConfig().page_size  # as served
        tokens = max(p.shared + max_batch * (p.private + num_steps + _WARM_STEPS + 2) for p in prompts)
        num_pages = max(tokens, longest) // self.page_size + 2 * max_batch + _SPARE_PAGES
        graphs = step_graphs_for(self.decoder, max_batch, EngineConfig().max_batch_tokens)
        self.runner = Runner(
            self.decoder, num_pages, self.page_size, graphs, num_host_pages=num_host_pages, kv_dtype=kv_dtype
        )

    def decoding(
        self, batch: int, prompts: Prompts, *, spare: int = 0, temperature: float = 0.0, top_p: float = 1.0
    ) -> Engine:
        """An engine on which so many requests decode, warm; `spare` more may join them."""
        engine = self.engine(max_running=max(batch, 16) + spare)
        shared = self.draw(prompts.shared)
        for index in range(batch):
            ids = shared + self.draw(prompts.private)
            self.submit(engine, str(index), ids, max_tokens=1024, temperature=temperature, top_p=top_p)
        decoding: set[str] = set()
        while len(decoding) < batch:
            decoding.update(event.request_id for event in engine.step() if event.token_ids)
        for _ in range(_WARM_STEPS):
            engine.step()
        return engine

    def ttft_ms(self, length: int) -> float:
        """From submission to the first token, alone, nothing cached."""
        engine = self.engine(max_running=16)
        ids = self.draw(length)
        started = time.perf_counter()
        self.submit(engine, "0", ids, max_tokens=1)
        while not engine.num_tokens["generated"]:
            engine.step()
        return (time.perf_counter() - started) * 1e3

    def engine(self, max_running: int) -> Engine:
        config = EngineConfig(page_size=self.page_size, max_running=max_running, max_sessions=0)
        if self.runner.graphs is not None and not self.runner.graphs.num_graphs:  # when kernels have been compiled
            most = max(max_running, self._max_batch)  # of all engines that this runner gets
            self.runner.capture_graphs(most, config.max_batch_tokens, lambda _share: None)
        return Engine(self.runner, None, config)

    def submit(self, engine: Engine, request_id: str, ids: list[int], max_tokens: int, **sampling: Any) -> None:
        params = SamplingParams(**{"temperature": 0, **sampling}, max_tokens=max_tokens, ignore_eos=True, seed=0)
        engine.submit(GenerationRequest(request_id=request_id, prompt_token_ids=tuple(ids), sampling=params))

    def draw(self, count: int) -> list[int]:
        drawn: list[int] = torch.randint(16, self.config.vocab_size, (count,), generator=self._ids).tolist()
        return drawn


def decode_bytes(model: Model, batch: int, prompts: Prompts, num_steps: int) -> int:
    """What a decode step reads at least, in the middle of so many timed ones: weights, and distinct tokens' KV."""
    distinct = prompts.shared + batch * (prompts.private + _WARM_STEPS + num_steps // 2)
    row_bytes, pages = model.config.head_dim * model.dtype.itemsize, model.runner.pool.k_pages
    kept = pages.shape[-1] * pages.itemsize / row_bytes  # less than 1 where KV has 8 bits
    return weight_bytes(model) + int(distinct * kv_bytes_per_token(model.config, model.dtype) * kept)


def weight_bytes(model: Model) -> int:
    """What a step reads of the weights, whatever its rows."""
    return (layer_weights(model.config) + head_weights(model.config)) * model.dtype.itemsize
