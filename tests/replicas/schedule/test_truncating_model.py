"""Truncated sessions on a real decoder: their logits are those of the dense computation, and nobody else's change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mneme.errors import CheckpointError, ConfigError, InvalidRequest
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.build import check_default_truncation
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.directory import load_model_config, parse_model_config
from mneme.replicas.queries import ForkSession
from mneme.replicas.request import GenerationRequest, PromptUsage, SamplingParams
from mneme.replicas.truncation import Truncation, default_for
from tests.budget import rarer
from tests.replicas.asked import answer
from tests.replicas.checkpoints import RecordingRunner, decoder_of, write_checkpoint
from tests.replicas.model.dense_session import DenseSession
from tests.replicas.model.test_parity import teacher_forced

pytestmark = pytest.mark.engine

WINDOW = 48
APPROXIMATE_TOLERANCE = 1e-4
EXACT_TOLERANCE = 2e-4
REUSE, RECOMPUTE = Truncation(keep_first=0), Truncation(strategy="recompute")
MODELS = ("llama-2", "llama-yarn", "qwen3")
TRUNCATIONS = {
    "oldest half": REUSE,
    "keep_first": Truncation(),
    "a quarter": Truncation(ratio=0.25, keep_first=19),
    "nearly all": Truncation(ratio=0.9, keep_first=0),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    directories = {name: tmp_path_factory.mktemp(name) for name in (*MODELS, "mistral", "qwen2-window")}
    return {name: (directory, write_checkpoint(name, directory)) for name, directory in directories.items()}


def engine_of(directory: Path, *, window: int = WINDOW, num_pages: int = 64, num_host_pages: int = 0) -> Engine:
    """Its rotary table ends where the window's does."""
    decoder = decoder_of(directory, max_context=window)
    runner = RecordingRunner(decoder, num_pages=num_pages, page_size=16, num_host_pages=num_host_pages)
    return Engine(runner, None, EngineConfig(page_size=16))


def submit(engine: Engine, name: str, ids: list[int], num_tokens: int, **options: Any) -> None:
    sampled = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, seed=3)
    request = {"request_id": name, "prompt_token_ids": tuple(ids), "sampling": sampled, "truncation": REUSE}
    engine.submit(GenerationRequest(**{**request, **options}))


def run(engine: Engine) -> tuple[dict[str, list[int]], dict[str, PromptUsage]]:
    """Output and usage by request."""
    output: dict[str, list[int]] = {}
    usage: dict[str, PromptUsage] = {}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event
            output.setdefault(event.request_id, []).extend(event.token_ids)
            if event.usage is not None:
                usage[event.request_id] = event.usage
        engine.forest.check()
    return output, usage


def logits_of(engine: Engine, name: str) -> torch.Tensor:
    runner: Any = engine.runner
    return torch.stack(runner.logits_by_request[name])


def drawn(num_tokens: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(0, 320, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def replay(dense: DenseSession, ids: list[int], output: list[int]) -> torch.Tensor:
    """The logits from which each token of a turn should have been drawn."""
    dense.begin_turn(ids)
    logits = []
    for token_id in output:
        logits.append(dense.step())
        dense.take(token_id)
    return torch.stack(logits)


def error_of(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


def check_turn(engine: Engine, dense: DenseSession, name: str, ids: list[int], output: list[int]) -> None:
    assert error_of(logits_of(engine, name), replay(dense, ids, output)) <= APPROXIMATE_TOLERANCE, name


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("truncation", TRUNCATIONS.values(), ids=TRUNCATIONS)
def test_logits_of_kept_kv(checkpoints: dict[str, tuple[Path, Any]], model_name: str, truncation: Truncation) -> None:
    """An answer over several truncations, and a next turn that overflows at once."""
    directory, model = checkpoints[model_name]
    engine = engine_of(directory)
    dense = DenseSession(model, WINDOW, truncation)
    for turn, (num_new, num_tokens) in enumerate([(29, 110), (21, 20)]):
        ids = drawn(num_new, seed=turn)
        submit(engine, f"t{turn}", ids, num_tokens, session_id="s", truncation=truncation, append=turn > 0)
        output, _ = run(engine)
        check_turn(engine, dense, f"t{turn}", ids, output[f"t{turn}"])
    assert dense.num_truncations >= 3
    exact = teacher_forced(model, dense.visible()[:-1], dense.visible()[-1:])
    assert error_of(logits_of(engine, "t1")[-1:], exact) > 100 * APPROXIMATE_TOLERANCE  # it is approximate


def test_a_cut_prompt_is_exact_until_it_overflows_again(checkpoints: dict[str, tuple[Path, Any]]) -> None:
    directory, model = checkpoints["llama-2"]
    engine = engine_of(directory)
    ids = drawn(100, seed=5)
    submit(engine, "t", ids, 60, session_id="s")
    output, usage = run(engine)
    dense = DenseSession(model, WINDOW, REUSE)
    check_turn(engine, dense, "t", ids, output["t"])
    num_seen = usage["t"].prompt_tokens
    num_exact = WINDOW + 1 - num_seen
    exact = teacher_forced(model, ids[-num_seen:], output["t"][:num_exact])
    assert error_of(logits_of(engine, "t")[:num_exact], exact) <= EXACT_TOLERANCE
    assert dense.num_truncations >= 3


def test_sessions_of_one_batch(checkpoints: dict[str, tuple[Path, Any]]) -> None:
    """They truncate in different steps and ways, two of them with the same past."""
    directory, model = checkpoints["qwen3"]
    engine = engine_of(directory)
    kinds = list(TRUNCATIONS.values())
    shared = drawn(30, seed=1)
    prompts = [shared, shared, [*shared[:20], *drawn(17, seed=2)], drawn(3, seed=3)]
    dense = [DenseSession(model, WINDOW, kind) for kind in kinds]
    for turn, num_tokens in enumerate((70, 45)):
        news = prompts if turn == 0 else [drawn(9, seed=index) for index in range(4)]
        for index, ids in enumerate(news):
            name = f"t{turn}s{index}"
            submit(
                engine,
                name,
                ids,
                num_tokens + 3 * index,
                session_id=f"s{index}",
                truncation=kinds[index],
                append=turn > 0,
            )
        output, _ = run(engine)
        for index, ids in enumerate(news):
            check_turn(engine, dense[index], f"t{turn}s{index}", ids, output[f"t{turn}s{index}"])
    assert all(each.num_truncations >= 2 for each in dense)


def test_two_choices_of_a_turn(checkpoints: dict[str, tuple[Path, Any]]) -> None:
    """Each goes its own way past the window; the session goes on from the first."""
    directory, model = checkpoints["llama-2"]
    engine = engine_of(directory)
    ids, truncation = drawn(25, seed=8), TRUNCATIONS["keep_first"]
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=3)
    first: list[DenseSession] = []
    for turn, new in enumerate((ids, drawn(6, seed=9))):
        names = [f"t{turn}.{choice}" for choice in range(2)]
        for choice, name in enumerate(names):
            submit(
                engine, name, new, 60, sampling=params, choice_index=choice, session_id="s", truncation=truncation,
                append=turn > 0,
            )  # fmt: skip
        output, _ = run(engine)
        assert output[names[0]] != output[names[1]]
        starts = (
            [first[0].copy(), first[0].copy()] if first else [DenseSession(model, WINDOW, truncation) for _ in "ab"]
        )
        for dense, name in zip(starts, names, strict=True):
            check_turn(engine, dense, name, new, output[name])
        first = starts


def test_kept_kv_that_was_on_the_host(checkpoints: dict[str, tuple[Path, Any]]) -> None:
    directory, model = checkpoints["llama-2"]
    engine = engine_of(directory, num_pages=7, num_host_pages=60)
    truncation = TRUNCATIONS["keep_first"]
    dense = DenseSession(model, WINDOW, truncation)
    num_from_host = 0
    for turn in range(3):
        ids, name = drawn(10, seed=turn), f"t{turn}"
        submit(engine, name, ids, 50, session_id="s", truncation=truncation, append=turn > 0)
        output, usage = run(engine)
        check_turn(engine, dense, name, ids, output[name])
        num_from_host += usage[name].host_tokens
        for other in range(2):  # takes all pages
            submit(engine, f"{name}o{other}", drawn(46, seed=100 + 2 * turn + other), 2, truncation=None)
            run(engine)
    assert num_from_host > 2 * 10
    assert dense.num_truncations >= 4


@pytest.mark.parametrize("truncation", [RECOMPUTE, Truncation(strategy="recompute", keep_first=6)])
@pytest.mark.parametrize("model_name", ["llama-yarn", "qwen2-window", *rarer(["qwen3", "mistral"])])
def test_recomputed_logits_are_those_of_the_visible_text(
    checkpoints: dict[str, tuple[Path, Any]], model_name: str, truncation: Truncation
) -> None:
    directory, model = checkpoints[model_name]
    engine = engine_of(directory)
    seen: list[int] = []
    for turn in range(2):
        ids, name = drawn(20, seed=turn), f"t{turn}"
        submit(engine, name, ids, 70, session_id="s", truncation=truncation, append=turn > 0)
        output, _ = run(engine)
        check_exact(engine, model, name, truncation, [*seen, *ids], output[name])
        seen = visible_after([*seen, *ids], output[name], truncation)


def visible_after(seen: list[int], output: list[int], truncation: Truncation) -> list[int]:
    """The text that is seen once all of the output is known; it is cut when a token is to be drawn behind it."""
    for token_id in output:
        seen = [*cut(seen, truncation), token_id]
    return seen


def cut(seen: list[int], truncation: Truncation) -> list[int]:
    """One truncation if it is over the window; in these tests the ratio is always more than what is over."""
    first = truncation.num_first
    return seen if len(seen) <= WINDOW else seen[:first] + seen[first + WINDOW // 2 :]


def check_exact(
    engine: Engine, model: Any, name: str, truncation: Truncation, seen: list[int], output: list[int]
) -> None:
    ours = logits_of(engine, name)
    for index, token_id in enumerate(output):
        seen = cut(seen, truncation)
        assert error_of(ours[index : index + 1], teacher_forced(model, seen, [token_id])) <= EXACT_TOLERANCE, index
        seen = [*seen, token_id]


def test_approximate_kv_stays_in_its_session(checkpoints: dict[str, tuple[Path, Any]]) -> None:
    """Strangers, other tenants, forks and turns that ask for exact KV get the logits of the text, during and after."""
    directory, model = checkpoints["llama-2"]
    engine = engine_of(directory, num_pages=128)
    ids = drawn(30, seed=1)
    submit(engine, "t", ids, 26, session_id="s")
    output, _ = run(engine)
    dense = DenseSession(model, WINDOW, REUSE)
    check_turn(engine, dense, "t", ids, output["t"])
    seen, new = dense.visible(), drawn(4, seed=2)
    answer(engine, ForkSession(("", "s"), "fork"))
    submit(engine, "next", new, 2, session_id="s", append=True)
    others: dict[str, dict[str, Any]] = {
        "stranger": {"truncation": None},
        "tenant": {"truncation": None, "salt": "t"},
        "tenant's session": {"session_id": "s", "salt": "t"},
        "other session": {"session_id": "other"},
    }
    for name, options in others.items():
        submit(engine, name, [*seen, *new], 4, **options)
    submit(engine, "fork", new, 4, session_id="fork", append=True)
    submit(engine, "recompute", new, 4, session_id="s", truncation=RECOMPUTE, append=True)
    output, _ = run(engine)
    check_turn(engine, dense, "next", new, output["next"])
    for name in (*others, "fork"):
        exact = teacher_forced(model, [*seen, *new], output[name])
        assert error_of(logits_of(engine, name), exact) <= EXACT_TOLERANCE, name
    exact = teacher_forced(model, dense.visible() + new, output["recompute"])
    assert error_of(logits_of(engine, "recompute"), exact) <= EXACT_TOLERANCE
    approximate = teacher_forced(model, [*seen, *new], output["next"])
    assert error_of(logits_of(engine, "next"), approximate) > 100 * EXACT_TOLERANCE


@pytest.mark.parametrize("model_name", ["mistral", "qwen2-window"])
def test_the_oldest_go_under_sliding_windows(checkpoints: dict[str, tuple[Path, Any]], model_name: str) -> None:
    directory, model = checkpoints[model_name]
    engine = engine_of(directory)
    dense = DenseSession(model, WINDOW, REUSE, load_model_config(directory).windows)
    for turn in range(2):
        ids, name = drawn(20, seed=turn), f"t{turn}"
        submit(engine, name, ids, 70, session_id="s", append=turn > 0)
        output, _ = run(engine)
        check_turn(engine, dense, name, ids, output[name])
    assert dense.num_truncations >= 5


@pytest.mark.parametrize("model_name", ["mistral", "qwen2-window"])
def test_sliding_windows_refuse_what_they_would_hide(checkpoints: dict[str, tuple[Path, Any]], model_name: str) -> None:
    directory, _ = checkpoints[model_name]
    engine = engine_of(directory)
    for truncation in (
        Truncation(keep_first=1),
        Truncation(keep_first=0, keep="system"),
        Truncation(keep_first=0, keep="important"),
    ):
        with pytest.raises(InvalidRequest, match="sliding-window") as refused:
            submit(engine, "t", [1, 2], 4, session_id="s", truncation=truncation)
        assert refused.value.field in ("truncation.keep_first", "truncation.keep")
        with pytest.raises(ConfigError, match=r"engine\.truncation\.keep"):
            check_default_truncation(EngineConfig(truncation=truncation), WINDOW, immovable="sliding_window")
    check_default_truncation(EngineConfig(), WINDOW, immovable="sliding_window")
    assert default_for(Truncation(ratio=0.25), "sliding_window") == Truncation(ratio=0.25, keep_first=0)
    assert not engine.has_work


def test_the_default_of_a_model_with_learned_positions_computes_anew() -> None:
    """So it starts without a word of truncation; what is configured and cannot be is refused."""
    check_default_truncation(EngineConfig(), WINDOW, immovable="learned_positions")
    assert default_for(Truncation(), "learned_positions") == Truncation(strategy="recompute")
    assert default_for(Truncation(), None) == Truncation()
    configured = Truncation(ratio=0.25)
    assert default_for(configured, "learned_positions") == configured
    with pytest.raises(ConfigError, match="learned positions"):
        check_default_truncation(EngineConfig(truncation=configured), WINDOW, immovable="learned_positions")


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo", "bloom"])
def test_models_of_other_families_are_refused_when_they_are_loaded(family: str) -> None:
    """So no request can ask for a truncation that their KV does not allow."""
    with pytest.raises(CheckpointError, match=r"model_type: must be one of .*llama, ministral, mistral"):
        parse_model_config({"model_type": family, "hidden_size": 64}, "config.json")
