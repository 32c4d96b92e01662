"""The draw in Triton, against a sort in float64 and against the sampler of the other devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mneme.replicas.model.sampler import SampleRow, _draw_by_kernel, sample
from mneme.replicas.request import SamplingParams
from tests.budget import rarer

triton_sampling = pytest.importorskip("mneme.kernels.triton.sampling")

# Cumulative probabilities are sums of rounded exponentials: how far they may be off.
CDF_ERROR = 3e-6
Vector = npt.NDArray[np.float64]


class Options(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def draw(logits: torch.Tensor, options: list[Options], uniforms: list[float], device: torch.device) -> list[int]:
    columns = [list(column) for column in zip(*options, strict=True)]
    params = triton_sampling.pack_params(*columns, uniforms)
    wide = torch.cat((logits, torch.full_like(logits, torch.nan)), 1).to(device)  # rows are read in place
    tokens: list[int] = triton_sampling.draw(wide[:, : logits.shape[1]], params).tolist()
    return tokens


def kept_in_order(logits: Vector, options: Options, error: float) -> tuple[npt.NDArray[np.int64], Vector]:
    """Token ids by falling probability (ids where that ties) and their cumulative probability, by sorting.

    `error` moves top-p, to see what rounding may do to it.
    """
    scaled = (logits.astype(np.float32) / np.float32(options.temperature)).astype(np.float64)
    order = np.argsort(-scaled, kind="stable")
    probs = np.exp(scaled[order] - scaled.max())
    keep = probs >= np.float32(options.min_p)
    if options.top_k > 0:
        keep[options.top_k :] = False
    probs = probs * keep / (probs * keep).sum()
    before = np.cumsum(probs) - probs
    probs = np.where((before < np.float32(options.top_p) + error) | (np.arange(len(probs)) == 0), probs, 0)
    if options.top_k <= 0 and options.top_p >= 1 and options.min_p <= 0:
        ids = np.argsort(order)  # nothing is cut: the order is the vocabulary's
        order, probs = np.arange(len(probs)), probs[ids]
    return order, np.cumsum(probs / probs.sum())


def acceptable(logits: Vector, options: Options, at: float) -> set[int]:
    """Tokens whose span of cumulative probability is within rounding of the uniform number."""
    if options.temperature == 0:
        return {int(np.argmax(logits))}
    found = set()
    for error in (-CDF_ERROR, CDF_ERROR):
        order, cumulative = kept_in_order(logits, options, error if options.top_p < 1 else 0.0)
        before = np.concatenate(([0.0], cumulative[:-1]))
        near = (before - CDF_ERROR <= at) & (at <= cumulative + CDF_ERROR) & (cumulative > before)
        found |= set(order[near].tolist())
    return found


EDGES = [
    Options(), Options(temperature=0.3), Options(temperature=2.0), Options(temperature=0), Options(top_k=1),
    Options(top_k=3), Options(top_k=10**6), Options(top_p=1e-9), Options(top_p=0.5), Options(top_p=0.95),
    Options(top_p=0.9999), Options(min_p=1.0), Options(min_p=0.2), Options(min_p=1e-6), Options(0.7, 40, 0.9, 0.01),
    Options(1.5, 2, 0.3, 0.0), Options(1.0, 5, 1.0, 0.5), Options(1.0, 5, 0.99, 1e-4),
]  # fmt: skip


def logits_of(kind: str, num_rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    normal = torch.randn(num_rows, vocab, generator=generator)
    if kind == "flat":
        return normal * 0.01
    if kind == "peaked":
        return normal * 6
    if kind == "tied":
        return (normal * 1.5).round()
    if kind == "equal":
        return torch.full_like(normal, -3.25)
    if kind == "zeros":  # of both signs
        return torch.where(normal > 0, 0.0, -0.0) - (normal.abs() > 1).float()
    barred = torch.where(normal > 1.5, normal, -torch.inf)
    barred[:, vocab // 2] = 0.5
    return barred


@pytest.mark.parametrize("kind", ["peaked", "tied", "zeros", "barred", *rarer(["flat", "equal"])])
@pytest.mark.parametrize("vocab", [7, *rarer([600])])
def test_draws_are_those_of_a_sort(
    triton_device: torch.device, kind: str, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_sampling, "CHUNK", 256)  # several chunks, the last not full
    logits = logits_of(kind, len(EDGES), vocab)
    random = np.random.default_rng(vocab).random(len(EDGES)).tolist()
    for uniforms in ([0.0] * len(EDGES), random):
        tokens = draw(logits, EDGES, uniforms, triton_device)
        for row, (token, options, at) in enumerate(zip(tokens, EDGES, uniforms, strict=True)):
            assert token in acceptable(logits[row].double().numpy(), options, at), (options, at)


def test_the_end_of_the_distribution_is_its_last_token(triton_device: torch.device) -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, -torch.inf]])
    last = 1.0 - 2**-53
    for options, token in ((Options(), 3), (Options(top_k=2), 1), (Options(top_p=0.6), 2), (Options(min_p=0.5), 3)):
        assert draw(logits, [options], [last], triton_device) == [token]


def test_rows_whose_best_logit_is_not_finite_have_no_token(triton_device: torch.device) -> None:
    logits = torch.randn(6, 4100, generator=torch.Generator().manual_seed(1))
    logits[0, 4099], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    for options in (Options(), Options(temperature=0), Options(top_k=4), Options(top_p=0.5)):
        tokens = draw(logits, [options] * 6, [0.5] * 6, triton_device)
        assert tokens[:3] == [-1] * 3
        assert min(tokens[3:]) >= 0


def test_many_candidates_are_searched_where_they_are(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_sampling, "CAPACITY", 16)
    logits = logits_of("tied", 6, 1500)
    options = [Options(top_p=0.9), Options(top_k=200), Options(min_p=0.05), Options(top_p=0.99, temperature=2.0)]
    options += [Options(top_k=3), Options()]
    uniforms = np.random.default_rng(5).random(6).tolist()
    tokens = draw(logits, options, uniforms, triton_device)
    for row, token in enumerate(tokens):
        assert token in acceptable(logits[row].double().numpy(), options[row], uniforms[row]), options[row]


def test_a_row_does_not_depend_on_the_others(triton_device: torch.device) -> None:
    logits = logits_of("peaked", len(EDGES), 1000)
    uniforms = np.random.default_rng(2).random(len(EDGES)).tolist()
    together = draw(logits, EDGES, uniforms, triton_device)
    for row in range(len(EDGES)):
        assert draw(logits[row : row + 1], [EDGES[row]], [uniforms[row]], triton_device) == [together[row]]


def sampler_row(rng: np.random.Generator, position: int, vocab: int) -> SampleRow:
    choices: dict[str, list[Any]] = {
        "temperature": [0, 0.3, 0.7, 1.0, 2.0], "top_k": [0, 0, 1, 2, 50, vocab], "top_p": [1.0, 1.0, 0.9, 0.5, 1e-6],
        "min_p": [0.0, 0.0, 0.1, 0.5, 1.0],
    }  # fmt: skip
    params = SamplingParams(**{name: rng.choice(np.array(values)).item() for name, values in choices.items()})
    return SampleRow(params, seed=int(rng.integers(2**60)), choice_index=0, position=position)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_the_samplers(triton_device: torch.device, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab = int(rng.choice([37, 1000, 5000]))
    logits = torch.from_numpy(rng.normal(size=(12, vocab)).astype(np.float32)) * float(rng.choice([0.1, 1, 5, 20]))
    rows = [sampler_row(rng, position, vocab) for position in range(len(logits))]
    expected = [sampled.token_id for sampled in sample(logits.clone(), rows).wait()]
    tokens = _draw_by_kernel(logits.to(triton_device), rows)
    assert tokens is not None
    assert [None if token < 0 else token for token in tokens.tolist()] == expected
