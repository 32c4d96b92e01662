"""Pages out of a pool and back, compiled and in numpy."""

from __future__ import annotations

import pytest
import torch

from mneme.kernels.native import kv as native_kv
from mneme.kernels.native.kv import gather_pages, scatter_pages
from tests.kernels.cases import needs_native


@pytest.fixture(params=["numpy", pytest.param("native", marks=needs_native)], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(native_kv, "library", lambda: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
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
