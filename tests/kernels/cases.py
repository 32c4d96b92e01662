"""Random pools, page tables and rows for the kernel tests, and the one tolerance table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from mneme.kernels.arguments import quantized
from mneme.kernels.attention import PageRef, Plan, QueryRows, RopeTable, attend, build_plan, new_slot_position
from mneme.kernels.native.library import library

MAX_POSITION = 256  # the rope tables reach 2 * MAX_POSITION
MAX_ROW_POSITION = 300
NUM_PAGES = 32


class Tolerance(NamedTuple):
    """Absolute, for values of standard deviation 1 and scores of order 1."""

    out: float
    lse: float  # of backends that round the rotated query once to the keys' type
    lse_of_unrounded: float = 2e-5  # of the torch backend, which does not


TOLERANCE = {
    torch.float32: Tolerance(out=2e-5, lse=2e-5),
    torch.float16: Tolerance(out=4e-3, lse=2e-3),
    torch.bfloat16: Tolerance(out=3e-2, lse=1.5e-2),
}

needs_native = pytest.mark.skipif(library() is None, reason="the compiled kernels are off or cannot be built")
# The backends of a CPU, beside the oracle.
CPU_BACKENDS = ["torch", pytest.param("native", marks=needs_native)]


@dataclass(frozen=True, kw_only=True, repr=False)
class Scene:
    """All arguments of one `attend`; free slots hold NaN."""

    tables: list[list[PageRef]]
    rows: QueryRows
    page_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    k_pages: Tensor
    v_pages: Tensor
    slot_position: Tensor
    q: Tensor
    rope: RopeTable | None
    options: dict[str, Any]

    def __repr__(self) -> str:
        shape = f"page_size={self.page_size}, heads={self.num_q_heads}/{self.num_kv_heads}, dim={self.head_dim}"
        rows = list(zip(*(array.tolist() for array in self.rows.arrays()), strict=True))
        tables = [[tuple(ref) for ref in table] for table in self.tables]
        return f"Scene({shape}, tables={tables}, rows={rows}, rope={self.rope}, options={self.options})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print every tensor

    def plan(self, **changes: Any) -> Plan:
        """The plan of the scene's tables and rows."""
        scene = replace(self, **{name: changes.pop(name) for name in ("tables", "rows") if name in changes})
        return build_plan(
            scene.tables,
            scene.rows,
            page_size=self.page_size,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            **changes,
        )

    def attend(self, plan: Plan, q: Tensor | None = None, **changes: Any) -> tuple[Tensor, Tensor]:
        """Attend with the scene's tensors and options."""
        q = self.q if q is None else q
        pool = (self.k_pages, self.v_pages, self.slot_position)
        return attend(q, *pool, self.rope, plan, **(self.options | changes))


def assert_close(
    got: tuple[Tensor, Tensor],
    wanted: tuple[Tensor, Tensor],
    backend: str = "native",
    weights: torch.dtype | None = None,
) -> None:
    """Both out and lse, within the tolerance of out's type (and of the backend); -inf must match exactly.

    weights  what a value's weight is rounded to, if to another type than out's
    """
    tolerance = TOLERANCE[weights or wanted[0].dtype]
    lse_tolerance = tolerance.lse_of_unrounded if backend == "torch" else tolerance.lse
    assert got[0].dtype == wanted[0].dtype
    assert got[1].dtype == torch.float32
    torch.testing.assert_close(got[0].float(), wanted[0].float(), atol=tolerance.out, rtol=tolerance.out)
    torch.testing.assert_close(got[1], wanted[1], atol=lse_tolerance, rtol=lse_tolerance)


def random_tables(
    rng: np.random.Generator, page_size: int, num_sequences: int, *, num_documents: int, masked: bool
) -> list[list[PageRef]]:
    """Cut prefixes, documents at several deltas (also twice in one table), pages of their own; masks if asked."""
    prefix = list(range(1, 1 + int(rng.integers(0, 5))))
    documents = [[6 + 2 * i, 7 + 2 * i][: int(rng.integers(1, 3))] for i in range(num_documents)]
    free_page = 6 + 2 * num_documents
    tables = []
    for _ in range(num_sequences):
        uses = [(page, 0) for page in prefix[: int(rng.integers(0, len(prefix) + 1))]]
        for _ in range(int(rng.integers(0, 4)) if documents else 0):
            document = documents[int(rng.integers(len(documents)))]
            delta = int(rng.choice([0, 7, 40, -5, 100]))
            uses += [(page, delta) for page in document]
        num_own = int(rng.integers(0, 3))
        uses += [(page, 0) for page in range(free_page, free_page + num_own)]
        free_page += num_own
        tables.append([PageRef(*use, _mask(rng, page_size) if masked else -1) for use in dict.fromkeys(uses)])
    return tables


def _mask(rng: np.random.Generator, page_size: int) -> int:
    """All, none, a tail cut off, or any bits: the last three in the unsigned form."""
    kind = rng.integers(4)
    if kind == 0:
        return -1
    full = (1 << page_size) - 1
    return [0, full >> int(rng.integers(page_size)), int(rng.integers(2**63)) & full][kind - 1]


def fill_pool(rng: np.random.Generator, slot_position: Tensor, page_size: int) -> None:
    """Pages of tokens that follow each other from any position; some pages are partly filled, some with holes."""
    for page in range(NUM_PAGES):
        filled = int(rng.choice([page_size, page_size, rng.integers(page_size + 1)]))
        start = page * page_size
        positions = int(rng.integers(0, 200)) + torch.arange(filled, dtype=torch.int32)
        slot_position[start : start + filled] = positions
        if filled and rng.integers(4) == 0:
            slot_position[start + int(rng.integers(filled))] = 2**30


def random_rows(rng: np.random.Generator, num_sequences: int, most_rows: int) -> QueryRows:
    """Sparse rows of some of the sequences, sequences in any order."""
    sequences: list[int] = []
    positions: list[int] = []
    for sequence in rng.permutation(num_sequences):
        count = int(rng.choice([0, 1, 1, rng.integers(1, most_rows + 1)]))
        sequences += [int(sequence)] * count
        positions += sorted(rng.choice(MAX_ROW_POSITION, count, replace=False).tolist())
    return QueryRows(np.array(sequences, np.int32), np.array(positions, np.int32))


@st.composite
def scenes(
    draw: st.DrawFn,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    most_rows: int = 12,
    plain: bool = False,
    heads: tuple[tuple[int, int], ...] = ((1, 1), (2, 2), (1, 3), (3, 1)),
    head_dims: tuple[int, ...] = (8,),
) -> Scene:
    """Any scene; `plain` ones have no window and no cap. `heads`: of KV, and query heads for each."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    page_size = draw(st.sampled_from([1, 4, 8, 64]))
    num_sequences = draw(st.integers(0, 6))
    num_kv_heads, num_groups = draw(st.sampled_from(heads))
    head_dim = draw(st.sampled_from(head_dims))
    tables = random_tables(
        rng, page_size, num_sequences, num_documents=draw(st.integers(0, 3)), masked=draw(st.booleans())
    )
    rows = random_rows(rng, num_sequences, draw(st.sampled_from([1, most_rows])))
    whole = head_dim // 2 * 2
    rotary_dim = draw(st.sampled_from([whole, whole, 4, None]))
    scale = (8 / head_dim) ** 0.5  # scores of one size for all dimensions
    options: dict[str, Any] = {"softmax_scale": scale * draw(st.sampled_from([0.35, 0.1]))}
    if not plain:
        options["window"] = draw(st.sampled_from([None, None, 1, 13, 90]))
        options["soft_cap"] = draw(st.sampled_from([None, 1.5]))
    return make_scene(
        rng,
        tables,
        rows,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        num_groups=num_groups,
        head_dim=head_dim,
        rope=None if rotary_dim is None else RopeTable.from_theta(100.0, rotary_dim, MAX_POSITION),
        dtype=dtype,
        kv_dtype=kv_dtype,
        options=options,
    )


def make_scene(
    rng: np.random.Generator,
    tables: list[list[PageRef]],
    rows: QueryRows,
    *,
    page_size: int,
    num_kv_heads: int = 2,
    num_groups: int = 2,
    head_dim: int = 8,
    rope: RopeTable | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    options: dict[str, Any] | None = None,
    slot_position: Tensor | None = None,
) -> Scene:
    """A scene over a pool of random keys; without `slot_position` the pages are filled at random.

    `kv_dtype`: of keys and values, int8 or (None) `dtype`.
    """
    if slot_position is None:
        slot_position = new_slot_position(NUM_PAGES * page_size)
        fill_pool(rng, slot_position, page_size)
    num_pages = len(slot_position) // page_size

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

    k_pages, v_pages = (normal(num_kv_heads, num_pages, page_size, head_dim) for _ in range(2))
    free = slot_position == 2**30
    for pages in (k_pages, v_pages):
        pages.view(num_kv_heads, -1, head_dim)[:, free] = torch.nan
    if kv_dtype == torch.int8:
        k_pages, v_pages = quantized(k_pages), quantized(v_pages)
    return Scene(
        tables=tables,
        rows=rows,
        page_size=page_size,
        num_q_heads=num_kv_heads * num_groups,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        k_pages=k_pages,
        v_pages=v_pages,
        slot_position=slot_position,
        q=normal(len(rows.arrays()[0]), num_kv_heads * num_groups, head_dim),
        rope=rope,
        options=options or {"softmax_scale": head_dim**-0.5},
    )
