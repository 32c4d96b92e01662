from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mneme.errors import InvalidRequest
from mneme.replicas.drawing import TokenCounts
from mneme.replicas.model import sampler
from mneme.replicas.model.draws import SampleRow
from mneme.replicas.model.sampler import sample, uniform
from mneme.replicas.request import SamplingParams

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.5])


def row(
    position: int = 0,
    prompt_ids: tuple[int, ...] = (),
    output_ids: tuple[int, ...] = (),
    barred_ids: tuple[int, ...] = (),
    mask: Any = None,
    **params: Any,
) -> SampleRow:
    counts = TokenCounts(output_ids) if output_ids or prompt_ids else None
    seen = TokenCounts(prompt_ids + output_ids) if output_ids or prompt_ids else None
    return SampleRow(
        SamplingParams(**params), seed=params.get("seed", 0) or 0, choice_index=0, position=position,
        barred_ids=barred_ids, seen=seen, drawn=counts, mask=mask,
    )  # fmt: skip


def draw(*rows: SampleRow, logits: torch.Tensor = LOGITS) -> list[int | None]:
    return [sampled.token_id for sampled in sample(logits.repeat(len(rows), 1), rows).wait()]


def test_greedy_is_the_largest_and_zero_needs_no_draw() -> None:
    assert draw(row(temperature=0), row(temperature=1e-6)) == [1, 1]


def test_the_uniform_number_is_a_fixed_function_of_its_counters() -> None:
    assert uniform(1, 0, 0) == uniform(1, 0, 0) == 0.33776134126730917
    assert (
        len({uniform(seed, choice, position) for seed in range(5) for choice in range(5) for position in range(5)})
        == 125
    )
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_uniform_numbers_are_uniform() -> None:
    counts = Counter(int(10 * uniform(3, 0, position)) for position in range(20_000))
    assert all(abs(count - 2_000) < 200 for count in counts.values())
    assert len(counts) == 10


@pytest.mark.parametrize(("temperature", "options"), [(0.5, {}), (1.7, {"top_k": 5})])
def test_draws_follow_the_distribution(temperature: float, options: dict[str, Any]) -> None:
    rows = [row(position, seed=5, temperature=temperature, **options) for position in range(20_000)]
    counts = Counter(draw(*rows))
    for token, probability in enumerate((LOGITS / temperature).softmax(-1).tolist()):
        assert counts[token] / len(rows) == pytest.approx(probability, abs=0.012)


@given(st.integers(0, 2**64 - 1), st.floats(0.1, 2.0), st.floats(0.05, 1.0), st.integers(0, 5), st.floats(0, 1))
def test_a_row_does_not_depend_on_the_others(
    seed: int, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    mine = row(7, seed=seed, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    assert draw(mine)[0] == draw(row(1, seed=9), mine, row(temperature=0))[1]


def support(**params: Any) -> set[int | None]:
    return set(draw(*(row(position, seed=1, **params) for position in range(4_000))))


def test_truncations_keep_the_right_tokens() -> None:
    probs = LOGITS.softmax(-1)  # in order: 1, 2, 0, 4, 3
    assert support(top_k=2) == {1, 2}
    assert support(top_k=-1) == support(top_k=0) == {0, 1, 2, 3, 4}
    assert support(top_p=float(probs[1]) - 0.01) == {1}
    assert support(top_p=float(probs[1]) + 0.01) == {1, 2}
    assert support(min_p=float(probs[0] / probs[1]) - 0.01) == {1, 2, 0}
    assert support(top_p=1e-9) == {1}
    assert support(top_k=2, top_p=float(probs[1] / (probs[1] + probs[2])) - 0.01) == {1}  # top-p of what top-k left


TRUNCATIONS = [
    {"top_k": 1}, {"top_k": 255}, {"top_k": 256}, {"top_k": 2000}, {"top_p": 0.3}, {"top_p": 0.999}, {"min_p": 0.01},
    {"min_p": 1.0}, {"top_k": 100, "top_p": 0.9}, {"top_k": 900, "min_p": 0.02, "top_p": 0.95}, {"min_p": 1e-6},
]  # fmt: skip


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_candidates_draw_what_the_whole_vocabulary_would(
    truncation: dict[str, Any], spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits come in steps, so that many are equal: also those at the candidates' end."""
    logits = (torch.randn(64, 1500, generator=torch.Generator().manual_seed(3)) * spread * 4).round() / 4
    rows = [row(position, seed=1, temperature=0.8, **truncation) for position in range(64)]
    found = [sampled.token_id for sampled in sample(logits.clone(), rows).wait()]
    monkeypatch.setattr(sampler, "_NUM_CANDIDATES", 1500)
    assert found == [sampled.token_id for sampled in sample(logits.clone(), rows).wait()]


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(4)) * 3
    logits[0, 1000:2000] = -torch.inf
    ends = logits[0].double().softmax(-1).cumsum(-1)
    for position in range(300):
        [sampled] = sample(logits.clone(), [row(position, seed=1)]).wait()
        number = uniform(1, 0, position)
        assert sampled.token_id is not None
        before = float(ends[sampled.token_id - 1]) if sampled.token_id else 0.0
        assert before - 1e-6 <= number <= float(ends[sampled.token_id]) + 1e-6
        assert not 1000 <= sampled.token_id < 2000


@given(st.lists(st.integers(0, 30)), st.lists(st.integers(0, 40), max_size=400), st.sampled_from([0, 2000]))
def test_counts_are_those_of_a_list(first: list[int], then: list[int], num_more: int) -> None:
    counts, then = TokenCounts(first), [*then, *range(num_more)]  # past their room
    for token_id in then:
        counts.add(token_id)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == Counter(first + then)


def test_penalties() -> None:
    assert draw(row(temperature=0, repetition_penalty=2.0, prompt_ids=(1,))) == [2]
    assert draw(row(temperature=0, repetition_penalty=2.0, output_ids=(1,))) == [2]
    negative = torch.tensor([-1.0, -0.9])
    assert draw(row(temperature=0, repetition_penalty=2.0, prompt_ids=(1,)), logits=negative) == [0]
    assert draw(row(temperature=0, presence_penalty=1.5, output_ids=(1, 1))) == [2]
    assert draw(row(temperature=0, frequency_penalty=0.4, output_ids=(1, 1))) == [1]
    assert draw(row(temperature=0, frequency_penalty=0.4, output_ids=(1, 1, 1))) == [2]
    assert draw(row(temperature=0, frequency_penalty=0.4, prompt_ids=(1, 1, 1))) == [1]


def test_biases_come_before_penalties() -> None:
    biased = row(temperature=0, logit_bias={0: 2.0}, repetition_penalty=3.0, prompt_ids=(0,))
    assert draw(biased, logits=torch.tensor([1.0, 1.5])) == [1]  # (1 + 2) / 3 < 1.5


def test_biases_and_barred_tokens() -> None:
    assert draw(row(temperature=0, logit_bias={3: 100.0})) == [3]
    assert draw(row(temperature=0, barred_ids=(1, 2))) == [0]
    assert support(barred_ids=(1,)) == {0, 2, 3, 4}


def test_logprobs_are_of_the_models_own_distribution() -> None:
    [sampled] = sample(LOGITS[None].clone(), [row(temperature=0, logprobs=2, logit_bias={3: 100.0})]).wait()
    expected = LOGITS.log_softmax(-1)
    assert sampled.logprobs.token_id == 3
    assert sampled.logprobs.logprob == pytest.approx(float(expected[3]))
    assert [token for token, _ in sampled.logprobs.top] == [1, 2]
    assert [value for _, value in sampled.logprobs.top] == pytest.approx([float(expected[1]), float(expected[2])])


def test_logits_that_are_not_finite_yield_no_token_and_spare_the_others() -> None:
    logits = torch.stack([LOGITS, LOGITS * torch.nan, LOGITS])
    assert [s.token_id for s in sample(logits, [row(temperature=0), row(), row(temperature=0)]).wait()] == [1, None, 1]


BAD_PARAMS: list[tuple[str, Any]] = [
    ("n", 0), ("n", 129), ("n", True), ("n", 1.0), ("max_tokens", 0), ("max_tokens", 2**63), ("min_tokens", -1),
    ("temperature", float("nan")), ("temperature", -0.1), ("temperature", 2.1), ("temperature", float("inf")),
    ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("min_p", -0.1), ("repetition_penalty", 0.0),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("seed", 2**64), ("logprobs", 21),
    ("repetition_penalty", 1e-300), ("stop", (1,)), ("temperature", 10**400),
    ("logit_bias", {1: 10**400}),
    ("stop", ("",)), ("stop", ("x" * 257,)), ("stop", ("a",) * 17), ("stop_token_ids", (-1,)),
    ("allowed_token_ids", ()), ("allowed_token_ids", (-1,)), ("allowed_token_ids", "12"),
    ("bad_words", (" ",)), ("bad_words", ("a",) * 65), ("bad_words", ("x" * 257,)), ("bad_words", "word"),
    ("logit_bias", {1: 101.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", dict.fromkeys(range(1025), 0.0)),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD_PARAMS)
def test_parameters_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field):
        SamplingParams(**{field: value})


def test_edits_of_a_batch_stay_with_their_rows() -> None:
    edited = [
        row(temperature=0, logit_bias={3: 100.0}),
        row(temperature=0),
        row(temperature=0, repetition_penalty=2.0, prompt_ids=(1,)),
        row(temperature=0, barred_ids=(1, 2, 1)),
        row(temperature=0, presence_penalty=1.5, output_ids=(1, 1)),
        row(temperature=0, mask=np.array([1 << 4], np.int32)),
    ]
    assert draw(*edited) == [draw(one)[0] for one in edited] == [3, 1, 2, 0, 2, 4]


def test_each_row_gets_the_logprobs_that_it_asks_for() -> None:
    rows = [row(temperature=0, logprobs=count) for count in (3, None, 0, 2)]
    logits = torch.stack([LOGITS, LOGITS, LOGITS - 7, LOGITS * torch.nan])
    three, none, zero, broken = sample(logits, rows).wait()
    expected = LOGITS.log_softmax(-1).tolist()
    assert three.logprobs.top == tuple((token, pytest.approx(expected[token])) for token in (1, 2, 0))
    assert none.logprobs is None
    assert zero.logprobs == (1, pytest.approx(expected[1], abs=1e-5), ())
    assert broken == (None, None)
