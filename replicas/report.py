"""What a replica tells every ingress of itself, beside the tokens: its load, what its work costs, and which KV it has.

Reports are numbered by the engine's life (`epoch`) and from 0 on (`seq`), and each goes to all subscribers alike. KV is
named by blocks of 64 tokens, each by a hash of all that stands before its end, keyed by the tenant's salt: what two
prompts share, without sending the prompts.

Torch-free and Ray-free.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

GivenUp = Literal["lookup", "waiting", "loading"]  # what of a load took too long; the last: within a step
GIVEN_UP: tuple[GivenUp, ...] = get_args(GivenUp)
BLOCK_TOKENS = 64
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """Says how busy a replica is, and what came and went since the report before.

    backlog_s        predicted, until what it has taken is prefilled; NaN: it has no cost model
    queued_tokens    of prompts, that are still to be computed
    running, waiting  requests
    context_tokens   that running requests see
    free_page_share  of the device's pages: those that nobody holds
    cost             `CostModel.figures`; None: nothing new of it
    device, host     hashes of blocks (`pack`) that are there now: on the device; in the engine's host tier alone
    gone             that are in neither any more
    is_snapshot      `device` and `host` are all there is
    node             whose cache tier it uses; empty: it has none
    sink_ids         tokens behind which documents are computed apart
    """

    epoch: str
    seq: int
    backlog_s: float
    queued_tokens: int
    running: int
    waiting: int
    context_tokens: int
    free_page_share: float
    cost: tuple[float, ...] | None = None
    device: bytes = b""
    host: bytes = b""
    gone: bytes = b""
    is_snapshot: bool = False
    node: str = ""
    sink_ids: tuple[int, ...] = ()


def first_digest(salt: str) -> bytes:
    """Return what stands before a tenant's first block."""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()


def next_digest(digest: bytes, packed: bytes) -> bytes:
    """Return the name of a block behind another; `packed`: its tokens as int32."""
    return hashlib.blake2b(digest + packed, digest_size=_HASH_BYTES).digest()


def pack(digests: Iterable[bytes]) -> bytes:
    """Put the names of blocks into one message."""
    return b"".join(digests)


def unpack(packed: bytes) -> list[int]:
    """Return them as numbers."""
    hashes = array("Q", packed[: len(packed) // _HASH_BYTES * _HASH_BYTES])
    return hashes.tolist()
