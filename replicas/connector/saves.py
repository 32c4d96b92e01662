"""Which chunks of the engine's KV the cache tier is to have: full ones as steps complete them, tails as requests end.

Only KV of exact lineage goes there: what a truncated session computes stays in its engine. A chunk that the store is
known to have is not saved again. Policy only: no tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.chunk.keys import Lineage, prefix_lineage
from mneme.cachetier.store import ChunkStore
from mneme.replicas.forest.nodes import DEVICE, Path
from mneme.replicas.sequence import Chunk, Sequence

_MAX_LINEAGES = 1024  # of tenants that were seen last
MIN_TAIL_TOKENS = 16  # shorter tails cost more to find than to compute

TokenRun = tuple[int, int, int, int]  # page id, first offset, number of tokens, first token in the chunk


@dataclass(slots=True, eq=False)
class ChunkChain:
    """The chunks of one sequence, from its root on."""

    lineage: Lineage
    keys: list[bytes] = field(default_factory=list)  # of full chunks, as far as they are known
    num_saved: int = 0  # full chunks that were saved or are not to be

    def restart(self) -> None:
        """The sequence sees other tokens."""
        self.keys, self.num_saved = [], 0


@dataclass(slots=True, eq=False, kw_only=True)
class SaveJob:
    """One chunk to be copied out of the pool, and where its tokens lie."""

    sequence: Sequence
    lineage: Lineage
    parent: bytes
    start: int  # position of the first token; where its key is rotated, too
    token_ids: list[int]
    runs: list[TokenRun]

    @property
    def is_void(self) -> bool:
        """Whether what its pages hold is not what was to be computed: the sequence had to go back to the queue."""
        return self.sequence.path is None


class ChunkSaves:
    """Decides after what is on sequences' paths; the engine's thread calls it."""

    def __init__(self, store: ChunkStore, fingerprint: ModelFingerprint, page_size: int) -> None:
        self.fingerprint = fingerprint
        self._page_size = page_size
        self._store = store
        self._chunk_tokens = fingerprint.layout.chunk_tokens
        self._lineages: OrderedDict[str, Lineage] = OrderedDict()

    def lineage(self, salt: str) -> Lineage:
        """The tenant's exact KV."""
        lineage = self._lineages.pop(salt, None) or prefix_lineage(self.fingerprint, salt)
        self._lineages[salt] = lineage
        if len(self._lineages) > _MAX_LINEAGES:
            self._lineages.popitem(last=False)
        return lineage

    def of_step(self, chunks: Iterable[Chunk]) -> list[SaveJob]:
        """Full chunks that a step completes; its rows are scheduled and not computed yet."""
        jobs: list[SaveJob] = []
        for chunk in chunks:
            chain, path = chunk.sequence.chain, chunk.sequence.path
            if chain is not None and path is not None and path.num_tokens // self._chunk_tokens > chain.num_saved:
                jobs += self._full(chunk.sequence, chain, path)
        return jobs

    def of_end(self, sequence: Sequence) -> list[SaveJob]:
        """What is left of a sequence that ends, its tail too."""
        chain, path = sequence.chain, sequence.path
        if chain is None or path is None:
            return []
        jobs = self._full(sequence, chain, path)
        start = path.num_tokens - path.num_tokens % self._chunk_tokens
        if path.num_tokens - start >= MIN_TAIL_TOKENS and not path.root.is_own:
            jobs += self._job(sequence, chain, path, start, path.num_tokens)
        return jobs

    def _full(self, sequence: Sequence, chain: ChunkChain, path: Path) -> list[SaveJob]:
        if path.root.is_own:  # truncated: approximate, and its own
            return []
        jobs: list[SaveJob] = []
        size = self._chunk_tokens
        for index in range(chain.num_saved, path.num_tokens // size):
            jobs += self._job(sequence, chain, path, index * size, (index + 1) * size)
        chain.num_saved = path.num_tokens // size
        return jobs

    def _job(self, sequence: Sequence, chain: ChunkChain, path: Path, start: int, end: int) -> list[SaveJob]:
        """None or one; a full chunk's key is noted."""
        ids, index = sequence.context[start:end], start // self._chunk_tokens
        parent = chain.keys[index - 1] if index else chain.lineage.root
        is_full = len(ids) == self._chunk_tokens
        key = chain.keys[index] if is_full and index < len(chain.keys) else chain.lineage.key(parent, ids)
        if is_full and index == len(chain.keys):
            chain.keys.append(key)
        if self._store.known([key]):
            return []
        runs = token_runs(path, start, end, self._page_size)
        if runs is None:
            return []
        return [SaveJob(sequence=sequence, lineage=chain.lineage, parent=parent, start=start, token_ids=ids, runs=runs)]


def token_runs(path: Path, start: int, end: int, page_size: int) -> list[TokenRun] | None:
    """Where the device has the tokens [start, end) of a path; None if it lacks some."""
    runs: list[TokenRun] = []
    index = bisect_right(path.nodes, start, key=lambda node: node.start) - 1
    position = start
    while position < end:
        node = path.nodes[index]
        index += 1
        limit = path.nodes[index].start if index < len(path.nodes) else end
        count = min(limit, end) - position
        page_id = node.pages[DEVICE]
        if page_id is None or node.start + node.filled[DEVICE] < position + count or count <= 0:
            return None
        runs.append((page_id, position % page_size, count, position - start))
        position += count
    return runs
