"""Who computes on a CPU: a table of seconds goes in, a choice comes out."""

from __future__ import annotations

import pytest

from mneme.kernels.native.choice import OURS, Choice, CpuKernels, HalfDtype, Timing, Work, choose, is_invariant

ROWS = (1, 16, 64, 256, 512)


def timings(
    work: Work, dtype: HalfDtype, ours: tuple[float, ...], torch: tuple[float, ...], rows: tuple[int, ...] = ROWS
) -> list[Timing]:
    return [Timing(work, dtype, *each) for each in zip(rows, ours, torch, strict=True)]


# Milliseconds of one processor each: an AMD without AMX, and an Intel with it, whose own bfloat16 is slow.
AMD = [
    *timings("product", "bfloat16", (0.3, 0.7, 2.1, 8.6, 17.5), (1.2, 1.4, 3.0, 9.8, 17.0)),
    *timings("product", "float32", (0.6, 1.4, 4.3, 17.0, 38.0), (1.3, 2.8, 6.3, 22.0, 41.0)),
]
AMX = [
    *timings("product", "bfloat16", (0.7, 1.8, 7.0, 27.0, 53.0), (1.6, 2.0, 3.5, 6.0, 7.5)),
    *timings("product", "float32", (1.2, 2.2, 4.0, 14.0, 28.0), (1.4, 3.0, 6.0, 20.0, 40.0)),
    *timings("attention", "bfloat16", (9.0, 40.0), (4.0, 11.0), (128, 512)),
]


def test_a_processor_without_more_for_torch_keeps_our_kernels() -> None:
    assert choose(AMD) == Choice("bfloat16", OURS, OURS)


def test_where_torch_has_instructions_of_its_own_it_takes_the_many_rows() -> None:
    assert choose(AMX) == Choice("bfloat16", CpuKernels(product_rows=64, prompt_rows=128), OURS)


def test_a_checkpoint_of_16_bits_is_computed_in_what_is_faster() -> None:
    """Where bfloat16 runs at half the rate of float32, float32 wins in spite of its bytes."""
    slow = [each._replace(torch_s=each.ours_s) for each in AMX]
    assert choose(slow).half_dtype == "float32"
    assert choose([each for each in slow if each.rows == 1]).half_dtype == "bfloat16"
    assert choose([]) == Choice("bfloat16", OURS, OURS)
    nearly = [each._replace(ours_s=each.ours_s * 0.45) if each.dtype == "float32" else each for each in AMD]
    assert choose(nearly).half_dtype == "bfloat16", "a tenth is noise"


@pytest.mark.parametrize(
    ("torch", "wanted"),
    [
        ((0.5, 0.5, 0.5, 0.5, 0.5), 1),
        ((2.0, 0.5, 2.0, 0.5, 0.5), 256),  # not below a size at which it is slower
        ((0.5, 0.5, 0.5, 0.5, 2.0), None),  # nor where the largest is
        ((0.9, 0.9, 0.9, 0.9, 0.9), None),  # a little is not worth that a row's bits depend on its step
    ],
)
def test_torch_is_chosen_from_where_it_is_clearly_faster(torch: tuple[float, ...], wanted: int | None) -> None:
    found = choose(timings("product", "float32", (1.0,) * 5, torch))
    assert found.kernels("float32") == CpuKernels(product_rows=wanted)
    assert found.kernels("bfloat16") == found.kernels("float16") == OURS


def test_float32_keeps_the_same_bits_unless_somebody_asks_for_what_is_fastest() -> None:
    assert [is_invariant(use, "float32") for use in ("auto", "invariant", "fastest")] == [True, True, False]
    assert [is_invariant(use, "bfloat16") for use in ("auto", "invariant", "fastest")] == [False, True, False]


def test_a_choice_says_who_computes() -> None:
    assert "bfloat16: products by torch from 64 rows, prompts by torch from 128 rows" in str(choose(AMX))
    assert "float32: products by ours, prompts by ours" in str(choose(AMX))
