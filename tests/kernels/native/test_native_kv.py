"""Chunks' tokens out of a pool and back, compiled and in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mneme.kernels.native import kv as native_kv
from mneme.kernels.native.kv import gather_chunk, scatter_chunk
from mneme.kernels.page_table import IntArray
from tests.budget import examples
from tests.kernels.cases import needs_native

_HEADS, _PAGES, _PAGE_SIZE, _DIM = 3, 5, 4, 6
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)  # int8: numbers and a scale are bytes here


@pytest.fixture(params=["numpy", pytest.param("native", marks=needs_native)], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(native_kv, "library", lambda: None)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_a_page_of_host_memory_is_a_chunk_among_others(dtype: torch.dtype) -> None:
    (k_pages, v_pages), host = _pool(dtype), torch.zeros(9, 2, _HEADS, _PAGE_SIZE, _DIM, dtype=dtype)
    memory = host.flatten(1).view(torch.uint8).numpy()
    runs = np.array([(page, 0, _PAGE_SIZE, row * _PAGE_SIZE) for page, row in ((4, 8), (0, 1), (2, 6))])
    gather_chunk(k_pages, v_pages, runs, _PAGE_SIZE, memory)
    for page, row in ((4, 8), (0, 1), (2, 6)):
        assert torch.equal(host[row], torch.stack((k_pages[:, page], v_pages[:, page])))
    assert not host[[0, 2, 3, 4, 5, 7]].any()
    elsewhere = torch.zeros_like(k_pages), torch.zeros_like(v_pages)
    scatter_chunk(memory, _PAGE_SIZE, runs, *elsewhere)
    for pages, copied in zip((k_pages, v_pages), elsewhere, strict=True):
        assert torch.equal(copied[:, [0, 2, 4]], pages[:, [0, 2, 4]])
        assert not copied[:, [1, 3]].any()
    for bad in ((0, 0, 1, 9 * _PAGE_SIZE), (0, 0, 2, 2 * _PAGE_SIZE - 1), (0, 0, 1, -1)):  # behind, across, before
        with pytest.raises(ValueError, match="run 1"):
            scatter_chunk(memory, _PAGE_SIZE, np.array([(1, 0, 1, 0), bad]), k_pages, v_pages)


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
@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
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
