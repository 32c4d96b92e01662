"""Pages and chunks' tokens out of a pool and back, compiled and in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mneme.kernels.native import kv as native_kv
from mneme.kernels.native.kv import gather_chunk, gather_pages, scatter_chunk, scatter_pages
from mneme.kernels.page_table import IntArray
from tests.kernels.cases import needs_native

_HEADS, _PAGES, _PAGE_SIZE, _DIM = 3, 5, 4, 6
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=["numpy", pytest.param("native", marks=needs_native)], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(native_kv, "library", lambda: None)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("page_ids", [[3], [5, 0, 2], []])
def test_pages_come_out_head_by_head_and_go_back_where_they_were(dtype: torch.dtype, page_ids: list[int]) -> None:
    pages = torch.randn(3, 6, 4, 10).to(dtype)
    ids = torch.tensor(page_ids, dtype=torch.int64)
    packed = torch.empty(len(ids), 3, 4, 10, dtype=dtype)
    gather_pages(pages, ids, packed)
    for page_id, page in zip(page_ids, packed, strict=True):
        assert torch.equal(page, pages[:, page_id])
    elsewhere = torch.zeros_like(pages)
    scatter_pages(packed, ids, elsewhere)
    wanted = torch.zeros_like(pages)
    wanted[:, page_ids] = pages[:, page_ids]
    assert torch.equal(elsewhere, wanted)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_pages_go_to_rows_of_their_own(dtype: torch.dtype) -> None:
    pages, packed = torch.randn(3, 6, 4, 10).to(dtype), torch.zeros(9, 3, 4, 10, dtype=dtype)
    ids, rows = torch.tensor([5, 0, 2]), torch.tensor([8, 1, 6])
    gather_pages(pages, ids, packed, rows)
    for page_id, row in zip(ids.tolist(), rows.tolist(), strict=True):
        assert torch.equal(packed[row], pages[:, page_id])
    assert not packed[[0, 2, 3, 4, 5, 7]].any()
    elsewhere = torch.zeros_like(pages)
    scatter_pages(packed, ids, elsewhere, rows)
    wanted = torch.zeros_like(pages)
    wanted[:, ids] = pages[:, ids]
    assert torch.equal(elsewhere, wanted)


def test_what_does_not_fit_is_refused_before_a_byte_moves() -> None:
    pages, packed, ids = torch.zeros(2, 4, 8, 16), torch.zeros(1, 2, 8, 16), torch.tensor([1])
    for bad_ids in (torch.tensor([4]), torch.tensor([-1]), torch.tensor([1], dtype=torch.int32), torch.tensor([[1]])):
        with pytest.raises(ValueError, match="page"):
            gather_pages(pages, bad_ids, packed)
    for bad in (packed[0], packed.half(), torch.zeros(2, 2, 8, 16), packed.transpose(2, 3).reshape(1, 2, 16, 8)):
        with pytest.raises(ValueError, match="packed"):
            scatter_pages(bad, ids, pages)
    with pytest.raises(ValueError, match="contiguous"):
        gather_pages(torch.zeros(2, 4, 16, 8).transpose(2, 3), ids, packed)
    for bad_rows in (torch.tensor([1]), torch.tensor([-1]), torch.tensor([0, 0]), torch.tensor([0], dtype=torch.int32)):
        with pytest.raises(ValueError, match="packed_ids"):
            gather_pages(pages, ids, packed, bad_rows)


@st.composite
def _runs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int, int]]]:
    """A number of tokens and runs among them that share neither slots nor tokens, in any order, with gaps."""
    pages = draw(st.permutations(range(_PAGES)))
    runs, token = [], draw(st.integers(0, 3))
    for page_id in pages[: draw(st.integers(0, _PAGES))]:
        offset = draw(st.integers(0, _PAGE_SIZE - 1))
        count = draw(st.integers(1, _PAGE_SIZE - offset))
        runs.append((page_id, offset, count, token))
        token += count + draw(st.integers(0, 2))
    return max(token, 1), draw(st.permutations(runs))


def _array(runs: list[tuple[int, int, int, int]]) -> IntArray:
    return np.array(runs, np.int64).reshape(-1, 4)


def _pool(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, _HEADS, _PAGES, _PAGE_SIZE, _DIM).to(dtype).unbind(0)
    return k.contiguous(), v.contiguous()


def _layer(num_tokens: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(2, _HEADS, num_tokens, _DIM).to(dtype)


def _bytes(layer: Tensor) -> native_kv.U8Array:
    return layer.view(-1).view(torch.uint8).numpy()


@given(_runs(), st.sampled_from(_DTYPES))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_token_of_a_run_goes_to_its_slot_and_nothing_else_changes(
    drawn: tuple[int, list[tuple[int, int, int, int]]], dtype: torch.dtype
) -> None:
    num_tokens, runs = drawn
    layer, (k_pages, v_pages) = _layer(num_tokens, dtype), _pool(dtype)
    wanted_k, wanted_v = k_pages.clone(), v_pages.clone()
    for page_id, offset, count, first in runs:
        for i in range(count):
            wanted_k[:, page_id, offset + i], wanted_v[:, page_id, offset + i] = layer[:, :, first + i]
    chunk = _bytes(layer.clone())
    chunk.flags.writeable = False
    scatter_chunk(chunk, num_tokens, _array(runs), k_pages, v_pages)
    assert torch.equal(k_pages, wanted_k)
    assert torch.equal(v_pages, wanted_v)

    gathered = _layer(num_tokens, dtype)
    wanted = gathered.clone()
    for _, _, count, first in runs:
        wanted[:, :, first : first + count] = layer[:, :, first : first + count]
    gather_chunk(k_pages, v_pages, _array(runs), num_tokens, _bytes(gathered))
    assert torch.equal(gathered, wanted)


_BIG = 2**63 - 1


@pytest.mark.parametrize(
    "bad_run",
    [
        (_PAGES, 0, 1, 0), (-1, 0, 1, 0), (0, -1, 2, 0), (0, _PAGE_SIZE, 1, 0), (0, 1, _PAGE_SIZE, 0), (0, 0, 0, 0),
        (0, 0, -1, 1), (0, 0, 1, -1), (0, 0, 1, 6), (0, 0, 2, 5), (_BIG, 0, 1, 0), (0, _BIG, 1, 0), (0, 1, _BIG, 1),
        (0, 0, 1, _BIG), (0, -_BIG, _BIG, 0), (0, 0, 1, -_BIG - 1),
    ],
)  # fmt: skip
def test_a_run_out_of_range_is_named_and_not_a_byte_moves(bad_run: tuple[int, int, int, int]) -> None:
    layer, (k_pages, v_pages) = _layer(6, torch.float32), _pool(torch.float32)
    before = [x.clone() for x in (layer, k_pages, v_pages)]
    runs = _array([(1, 0, 2, 0), bad_run])
    with pytest.raises(ValueError, match="run 1"):
        scatter_chunk(_bytes(layer), 6, runs, k_pages, v_pages)
    with pytest.raises(ValueError, match="run 1"):
        gather_chunk(k_pages, v_pages, runs, 6, _bytes(layer))
    assert all(torch.equal(x, y) for x, y in zip((layer, k_pages, v_pages), before, strict=True))


def test_arrays_that_do_not_fit_are_refused() -> None:
    layer, (k_pages, v_pages) = _layer(6, torch.float32), _pool(torch.float32)
    chunk, runs = _bytes(layer), _array([(0, 0, 1, 0)])
    for bad_chunk, num_tokens in ((chunk[:-1], 6), (chunk, 5), (chunk.view(np.int8), 6), (chunk[::2], 3), (chunk, 0)):
        with pytest.raises(ValueError, match="chunk"):
            scatter_chunk(bad_chunk, num_tokens, runs, k_pages, v_pages)  # type: ignore[arg-type]
    for bad_runs in (runs.astype(np.int32), runs[0], runs[:, :3], np.asfortranarray(np.repeat(runs, 2, 0))):
        with pytest.raises(ValueError, match="runs"):
            scatter_chunk(chunk, 6, bad_runs, k_pages, v_pages)
    turned = k_pages.transpose(1, 2)
    for k, v in ((k_pages, v_pages[:2]), (k_pages, v_pages.half()), (turned, turned), (k_pages[0], v_pages[0])):
        with pytest.raises(ValueError, match="pages"):
            scatter_chunk(chunk, 6, runs, k, v)
    chunk.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        gather_chunk(k_pages, v_pages, runs, 6, chunk)
