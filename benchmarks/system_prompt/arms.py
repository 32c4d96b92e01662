"""What is compared: one model, one pool and one engine, with sharing off, in memory only, and in attention too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from engines import PAGE_SIZE, make_decoder, request

from mneme.kernels.work import Share
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.runner import Runner
from mneme.replicas.request import GenerationRequest

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Arm(NamedTuple):
    name: str
    prefix_sharing: bool
    share: Share


NONE = Arm("none", False, "never")  # every request computes, stores and reads its own prompt
PS = Arm("PS", True, "never")  # computed and stored once; attention reads it for each sequence
RELAY = Arm("relay", True, "auto")  # as an engine is by default: read once for all where that pays
ARMS = (NONE, PS, RELAY)


class Shape(NamedTuple):
    """Lengths of each request, tokens."""

    system: int
    user: int
    new: int

    @property
    def num_pages(self) -> int:
        """Pages of one request that shares nothing."""
        return -(-sum(self) // PAGE_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of every arm's engine alike."""

    max_running: int = 128
    max_batch_tokens: int = 2048
    max_waiting: int = 8192


class Replica:
    """One model and one page pool, which the arms use in turns; a new engine finds nothing of the last one's."""

    def __init__(self, shape: dict[str, Any], num_pages: int, dtype: torch.dtype, seed: int) -> None:
        """The pool is touched here, so that no arm waits for the system's pages."""
        self._decoder = make_decoder(shape, seed, dtype=dtype)
        self._runner = Runner(self._decoder, num_pages, PAGE_SIZE)
        self.num_pages = num_pages
        for pages in (self._runner.pool.k_pages, self._runner.pool.v_pages):
            pages.fill_(0)

    def engine(self, arm: Arm, limits: Limits) -> Engine:
        """An empty engine; the last one is of no use any more."""
        self._decoder.share = arm.share
        config = EngineConfig(
            prefix_sharing=arm.prefix_sharing,
            share=arm.share,
            max_running=limits.max_running,
            max_batch_tokens=limits.max_batch_tokens,
            max_waiting=limits.max_waiting,
            max_waiting_tokens=None,
        )
        return Engine(self._runner, None, config)


def pool_pages(shape: Shape, num_running: int) -> int:
    """A pool in which so many requests run even if they share nothing, beside the tenth that admission leaves."""
    return -(-shape.num_pages * num_running * 10 // 9) + num_running


def requests(prompts: list[list[int]], num_new: int) -> list[GenerationRequest]:
    """Greedy, of exactly so many new tokens."""
    return [request(str(index), ids, num_new) for index, ids in enumerate(prompts)]
