"""What compiled code would read or write beyond, or what breaks a rule, is refused by name before anything is done."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mneme.kernels import ops
from mneme.kernels.attention import (
    PageRef,
    PageTable,
    Plan,
    QueryRows,
    RopeTable,
    attend,
    build_plan,
    mark_written,
    new_slot_position,
    write_kv,
)
from mneme.kernels.linear import PackedLinear
from mneme.kernels.page_table import references_of
from tests.kernels.cases import needs_native

SIZES: dict[str, Any] = {"page_size": 8, "num_q_heads": 2, "num_kv_heads": 1, "head_dim": 16}
ROPE = RopeTable.from_theta(100.0, 16, 64)
POSITIONS = torch.arange(32, dtype=torch.int32)
IDS, MASKS = np.zeros(1, np.int32), np.full(1, -1, np.int64)


def plan_of(*positions: int, tables: Any = None, **changes: Any) -> Plan:
    """One sequence with rows at these positions."""
    return build_plan(tables or [[PageRef(1)]], QueryRows([0] * len(positions), positions), **(SIZES | changes))


def two_sequences() -> Plan:
    return build_plan([PageTable.own([1, 2, 10]), PageTable.own([1, 2, 11])], QueryRows([0, 1], [20, 20]), **SIZES)


def attend_once(**changes: Any) -> tuple[Tensor, Tensor]:
    """One row over one page, with some arguments replaced."""
    pages = torch.randn(1, 4, 8, 16)
    arguments: dict[str, Any] = {
        "q": torch.randn(1, 2, 16), "k_pages": pages, "v_pages": pages, "slot_position": POSITIONS, "rope": ROPE,
        "plan": plan_of(20), "softmax_scale": 0.3,
    }  # fmt: skip
    return attend(**(arguments | changes))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("q: ", {"q": torch.zeros(2, 2, 16)}),
        ("k_pages: ", {"k_pages": torch.zeros(1, 4, 4, 16)}),
        ("k_pages: ", {"k_pages": torch.zeros(1, 4, 8)}),
        ("v_pages: ", {"v_pages": torch.zeros(1, 3, 8, 16)}),
        ("k_pages, v_pages: ", {"v_pages": torch.zeros(1, 4, 16, 8).transpose(2, 3)}),
        ("slot_position: ", {"slot_position": POSITIONS.long()}),
        ("slot_position: ", {"slot_position": POSITIONS[:31]}),
        ("slot_position: .*contiguous", {"slot_position": torch.stack((POSITIONS, POSITIONS), 1)[:, 0]}),
        ("q, k_pages, v_pages: ", {"q": torch.zeros(1, 2, 16, dtype=torch.bfloat16)}),
        ("k_pages: must have shape .* 20", dict.fromkeys(("k_pages", "v_pages"), torch.zeros(1, 4, 8, 16).char())),
        ("q, k_pages, v_pages: ", {"v_pages": torch.zeros(1, 4, 8, 16).half()}),
        ("q, k_pages, v_pages, slot_position: ", {"slot_position": POSITIONS.to("meta")}),
        ("rope: ", {"rope": RopeTable.from_theta(10.0, 32, 8)}),
        ("rope: ", {"rope": ROPE.to("meta")}),
        ("window: must be", {"window": 0}),
        ("window: must be", {"window": 2.5}),
        ("soft_cap: must be", {"soft_cap": 0.0}),
        ("soft_cap: must be", {"soft_cap": math.inf}),
        ("softmax_scale: must be", {"softmax_scale": math.nan}),
        ("backend: ", {"backend": "cuda"}),
        ("plan: uses page 12", {"plan": plan_of(20, tables=[[PageRef(12)]])}),
    ],
)
def test_attend(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        attend_once(**changes)


def test_scales_on_a_gpu_lie_where_a_float32_can_be_read() -> None:
    pages = meta(1, 4, 8, 22, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"^k_pages: int8 rows on a GPU end where a float32 may be, head_dim is 18"):
        attend_once(
            q=meta(1, 2, 18), k_pages=pages, v_pages=pages, slot_position=meta(32, dtype=torch.int32),
            plan=plan_of(20, head_dim=18),
        )  # fmt: skip


def test_a_pool_has_fewer_slots_than_32_bits_count() -> None:
    pages = meta(1, 2**28, 8, 16)
    with pytest.raises(ValueError, match=r"^k_pages: a pool has at most"):
        attend_once(q=meta(1, 2, 16), k_pages=pages, v_pages=pages, slot_position=meta(2**31, dtype=torch.int32))


@pytest.mark.parametrize(
    ("message", "call"),
    [
        *(
            (f"{name}: must be an integer", lambda name=name: plan_of(1, **{name: float(SIZES[name])}))
            for name in SIZES
        ),
        ("page_size: ", lambda: plan_of(1, page_size=3)),
        ("page_size: ", lambda: plan_of(1, page_size=128)),
        ("num_q_heads: ", lambda: plan_of(1, num_q_heads=3, num_kv_heads=2)),
        ("head_dim: ", lambda: plan_of(1, head_dim=0)),
        ("share: ", lambda: plan_of(1, share="sometimes")),
        ("rows: position", lambda: plan_of(-1)),
        ("rows: position", lambda: plan_of(2**29)),
        ("rows: ", lambda: plan_of(1).with_rows(QueryRows([0], [1, 2]))),
        ("rows: ", lambda: plan_of(1).with_rows(QueryRows([[0]], [[1]]))),
        ("rows: ", lambda: plan_of(1).with_rows(QueryRows([0.5], [1]))),
        *(("rows: ", lambda s=s: two_sequences().with_rows(QueryRows(s, [5, 5, 6]))) for s in ([0, 1, 0], [0, 2, 2])),
        ("rows: ", lambda: two_sequences().with_rows(QueryRows([-1, 0, 0], [5, 5, 6]))),
    ],
)
def test_plans_and_their_edits(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("page_ids: must be a numpy vector", lambda: PageTable(1, IDS, MASKS)),  # type: ignore[arg-type]
        ("page_ids: must be a numpy vector", lambda: PageTable(np.zeros((), np.int32), IDS, MASKS)),
        ("page_ids: must be a numpy vector", lambda: PageTable(IDS.astype(np.int8), IDS, MASKS)),
        ("deltas: must be a numpy vector", lambda: PageTable(IDS, IDS.astype(np.int16), MASKS)),
        ("deltas: ", lambda: PageTable(IDS, np.zeros(3, np.int32), MASKS)),
        ("masks: must be a numpy vector", lambda: PageTable(IDS, IDS, IDS)),
        ("masks: ", lambda: PageTable(IDS, IDS, np.zeros(1, np.uint64))),
        ("page_ids: must fit int32", lambda: PageTable.own([1]).append(np.array([2**31]), [0], [-1])),
        ("deltas: must be integers", lambda: PageTable.own([1]).append([1], [0.5], [-1])),
        ("page_ids: must be integers", lambda: PageTable.own([1.7])),
        ("page_ids: must fit int32", lambda: PageTable.own(np.array([2**32 + 1]))),
        *(
            ("page_tables: ", lambda ref=ref: references_of([PageTable.from_refs([ref])], 4))
            for ref in (
                PageRef(1.7, 0), PageRef(1, 0.5), PageRef(1, 0, 1.0), PageRef(None),  # type: ignore[arg-type]
                PageRef(-1), PageRef(2**31), PageRef(0, 2**29), PageRef(0, -(2**29)), PageRef(0, 0, 2**64),
            )
        ),
        # Its negative is itself in 64 bits.
        ("page_tables: deltas", lambda: plan_of(3, tables=[PageTable(IDS, np.array([-(2**63)]), MASKS)])),
    ],
)  # fmt: skip
def test_page_tables(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("theta: ", lambda: RopeTable.from_theta(0.0, 8, 16)),
        ("rotary_dim: ", lambda: RopeTable.from_theta(100.0, 7, 16)),
        ("rotary_dim: ", lambda: RopeTable.from_theta(100.0, 0, 16)),
        ("max_position: ", lambda: RopeTable.from_theta(100.0, 8, 0)),
        ("inv_freq: ", lambda: RopeTable.from_inv_freq([], 8)),
        *(
            ("table: must be float32", lambda table=table: RopeTable(table, 4))
            for table in (
                torch.zeros(8, 2, 4, dtype=torch.float64), torch.zeros(8, 2, 4, dtype=torch.bfloat16),
                torch.zeros(8, 2), torch.zeros(8, 3, 4), torch.zeros(8, 4, 2).transpose(1, 2),
            )
        ),
    ],
)  # fmt: skip
def test_rope_tables(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("k, v: ", {"k": torch.ones(1, 3, 16), "v": torch.ones(1, 3, 16)}),
        ("k, v: ", {"v": torch.ones(2, 1, 16)}),
        ("slots, positions: ", {"slots": torch.zeros(2, dtype=torch.int64)}),
        ("rope: rotates 64 dimensions, head_dim is 16", {"rope": RopeTable.from_theta(100.0, 64, 16)}),
    ],
)
def test_writes(message: str, changes: dict[str, Any]) -> None:
    pool, key, one = torch.zeros(2, 1, 4, 8, 16), torch.ones(1, 1, 16), torch.zeros(1, dtype=torch.int64)
    arguments = {"k": key, "v": key, "slots": one, "positions": one, "rope": ROPE} | changes
    with pytest.raises(ValueError, match=f"^{message}"):
        write_kv(**arguments, k_pages=pool[0], v_pages=pool[1])
    assert not pool.any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("position", [-1, -(2**31), 2**29])
def test_positions_that_rows_cannot_have(position: int, dtype: torch.dtype) -> None:
    slot_position, slots = new_slot_position(4), torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"^positions: must be in"):
        mark_written(slot_position, slots, torch.tensor([5, position], dtype=dtype))
    assert torch.equal(slot_position, new_slot_position(4))
    mark_written(slot_position, slots[:0], torch.tensor([], dtype=dtype))
    mark_written(slot_position, slots, torch.tensor([0, 2**29 - 1], dtype=dtype))
    assert slot_position[1:3].tolist() == [0, 2**29 - 1]


ROWS, WEIGHT, ANY = torch.zeros(20, 8), torch.zeros(8), 1e-6
PAIRS: Any = [(1, 4), (4, 1), (1, 1), (5, 5)]  # temperatures and numbers, of four rows of logits
BAD_LOGITS = [torch.zeros(4, 100).bfloat16(), torch.zeros(4, 100).double(), torch.zeros(100), torch.zeros(4, 0)]


@pytest.mark.parametrize(
    ("message", "call"),
    [
        *(
            ("weight: ", lambda size=size, d=dtype, op=op: op(ROWS.to(d), torch.zeros(size, dtype=d)))
            for dtype in (torch.float32, torch.float16)
            for size in ((7,), (1, 8))
            for op in (lambda x, w: ops.rms_norm(x, w, ANY), lambda x, w: ops.add_rms_norm(x, x, w, ANY))
        ),
        ("weight: .* on meta", lambda: ops.rms_norm(ROWS, meta(8), ANY)),
        ("delta: .* on meta", lambda: ops.add_rms_norm(ROWS, meta(20, 8), WEIGHT, ANY)),
        *(
            ("delta: ", lambda shape=shape: ops.add_rms_norm(ROWS, torch.zeros(shape), WEIGHT, ANY))
            for shape in ((19, 8), (20, 1), (8,))
        ),
        *(
            ("gate_up: ", lambda shape=shape: ops.gated(torch.zeros(shape), "silu"))
            for shape in ((3, 7), (8,), (2, 3, 8))
        ),
        (r"activation: must be one of silu, gelu, gelu_tanh \(got 'relu'\)", lambda: ops.gated(ROWS, "relu")),  # type: ignore[arg-type]
        *(
            ("logits: must be float32", lambda x=x: ops.draw_whole(x, [1.0] * len(x), [0.5] * len(x)))
            for x in BAD_LOGITS
        ),
        *(("logits: must be float32", lambda x=x: ops.mask_logits(x, torch.zeros(3, 4))) for x in BAD_LOGITS),
        *(
            ("bits: must be int32", lambda bits=bits: ops.mask_logits(torch.zeros(3, 33), bits))
            for bits in (
                torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32),
                torch.zeros(3, 4, dtype=torch.int32)[:, ::2], meta(3, 2),
            )
        ),
        ("bits: .* both contiguous", lambda: ops.mask_logits(torch.zeros(33, 3).T, torch.zeros(3, 2).int())),
        *(
            ("temperatures, numbers: ", lambda t=t, n=n: ops.draw_whole(torch.zeros(4, 100), [1.0] * t, [0.5] * n))
            for t, n in PAIRS
        ),
    ],
)  # fmt: skip
def test_row_wise_operations(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


def packed(dtype: torch.dtype = torch.float32) -> PackedLinear:
    return PackedLinear(torch.zeros(64, 8, dtype=dtype))


@needs_native
@pytest.mark.parametrize(
    ("message", "call"),
    [
        *(
            (r"bias: must have shape \(64,\)", lambda bias=bias: PackedLinear(torch.zeros(64, 8), bias))
            for bias in (torch.zeros(3), torch.zeros(65), torch.zeros(1, 64), meta(64))
        ),
        *(
            ("weight: ", lambda weight=weight: PackedLinear(weight))
            for weight in (torch.zeros(64, 8).half(), torch.zeros(8), meta(64, 8))
        ),
        *(
            ("x: must be torch.float32", lambda x=x: packed()(x))
            for x in (torch.zeros(8), torch.zeros(1, 2, 8), torch.zeros(2, 7), torch.zeros(2, 8).bfloat16(), meta(2, 8))
        ),
        *(
            ("out_dtype: must be float32 or", lambda d=d, out=out: packed(d)(torch.zeros(512, 8, dtype=d), out))
            for d, out in (
                (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float32, torch.float64)
            )
        ),
    ],
)  # fmt: skip
def test_packed_linears(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
