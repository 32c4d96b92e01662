"""Truncated sessions on a real decoder: their logits are those of the dense computation, and nobody else's change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mneme.errors import ConfigError, InvalidRequest
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.build import check_default_truncation
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.directory import load_model_config
from mneme.replicas.queries import ForkSession
from mneme.replicas.truncation import Truncation, default_for
from tests.replicas.asked import answer
from tests.replicas.checkpoints import decoder_of, teacher_forced, write_checkpoint
from tests.replicas.model.dense_session import DenseSession
from tests.replicas.tiered_engine import answers, draw, logits_of, make_engine, run, submit

pytestmark = pytest.mark.engine

WINDOW = 48
APPROXIMATE_TOLERANCE = 1e-4
EXACT_TOLERANCE = 2e-4
REUSE, RECOMPUTE = Truncation(keep_first=0), Truncation(strategy="recompute")
TRUNCATIONS = {
    "oldest half": REUSE,
    "keep_first": Truncation(),
    "a quarter": Truncation(ratio=0.25, keep_first=19),
    "nearly all": Truncation(ratio=0.9, keep_first=0),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    directories = {
        name: tmp_path_factory.mktemp(name) for name in ("llama-2", "llama-yarn", "qwen3", "mistral", "qwen2-window")
    }
    return {name: (directory, write_checkpoint(name, directory)) for name, directory in directories.items()}


def engine_of(directory: Path, *, window: int = WINDOW, num_pages: int = 64) -> Engine:
    """Its rotary table ends where the window's does."""
    return make_engine(decoder_of(directory, max_context=window), num_pages, num_host_pages=0)


def error_of(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


def check_turn(engine: Engine, dense: DenseSession, name: str, ids: list[int], output: list[int]) -> None:
    assert error_of(logits_of(engine, name), dense.replay(ids, output)) <= APPROXIMATE_TOLERANCE, name


@pytest.mark.parametrize(
    ("model_name", "kind"),
    [
        *(("llama-2", kind) for kind in TRUNCATIONS),
        ("llama-yarn", "keep_first"),
        ("qwen3", "a quarter"),
        ("mistral", "oldest half"),  # sliding windows
        ("qwen2-window", "oldest half"),
    ],
)
def test_logits_of_kept_kv(checkpoints: dict[str, tuple[Path, Any]], model_name: str, kind: str) -> None:
    """An answer over several truncations, and a next turn that overflows at once."""
    (directory, model), truncation = checkpoints[model_name], TRUNCATIONS[kind]
    engine = engine_of(directory)
    dense = DenseSession(model, WINDOW, truncation, load_model_config(directory).windows)
    for turn, (num_new, num_tokens) in enumerate([(29, 110), (21, 20)]):
        ids = draw(turn, num_new)
        submit(engine, f"t{turn}", ids, num_tokens, session_id="s", truncation=truncation, append=turn > 0)
        output = answers(run(engine))
        check_turn(engine, dense, f"t{turn}", ids, output[f"t{turn}"])
    assert dense.num_truncations >= 3
    exact = teacher_forced(model, dense.visible()[:-1], dense.visible()[-1:])
    assert error_of(logits_of(engine, "t1")[-1:], exact) > 100 * APPROXIMATE_TOLERANCE  # it is approximate


def test_sessions_of_one_batch(checkpoints: dict[str, tuple[Path, Any]]) -> None:
    """They truncate in different steps and ways, two of them with the same past."""
    directory, model = checkpoints["qwen3"]
    engine = engine_of(directory)
    kinds = list(TRUNCATIONS.values())
    shared = draw(1, 30)
    prompts = [shared, shared, [*shared[:20], *draw(2, 17)], draw(3, 3)]
    dense = [DenseSession(model, WINDOW, kind) for kind in kinds]
    for turn, num_tokens in enumerate((70, 45)):
        news = prompts if turn == 0 else [draw(index, 9) for index in range(4)]
        for index, ids in enumerate(news):
            name = f"t{turn}s{index}"
            more = {"session_id": f"s{index}", "truncation": kinds[index], "append": turn > 0}
            submit(engine, name, ids, num_tokens + 3 * index, **more)
        output = answers(run(engine))
        for index, ids in enumerate(news):
            check_turn(engine, dense[index], f"t{turn}s{index}", ids, output[f"t{turn}s{index}"])
    assert all(each.num_truncations >= 2 for each in dense)


def test_approximate_kv_stays_in_its_session(checkpoints: dict[str, tuple[Path, Any]]) -> None:
    """Strangers, other tenants, forks and turns that ask for exact KV get the logits of the text, during and after."""
    directory, model = checkpoints["llama-2"]
    engine = engine_of(directory, num_pages=128)
    ids = draw(1, 30)
    submit(engine, "t", ids, 26, session_id="s", truncation=REUSE)
    output = answers(run(engine))
    dense = DenseSession(model, WINDOW, REUSE)
    check_turn(engine, dense, "t", ids, output["t"])
    seen, new = dense.visible(), draw(2, 4)
    answer(engine, ForkSession(("", "s"), "fork"))
    submit(engine, "next", new, 2, session_id="s", truncation=REUSE, append=True)
    others: dict[str, dict[str, Any]] = {
        "stranger": {},
        "tenant": {"salt": "t"},
        "tenant's session": {"session_id": "s", "salt": "t", "truncation": REUSE},
        "other session": {"session_id": "other", "truncation": REUSE},
    }
    for name, options in others.items():
        submit(engine, name, [*seen, *new], 4, **options)
    submit(engine, "fork", new, 4, session_id="fork", truncation=REUSE, append=True)
    submit(engine, "recompute", new, 4, session_id="s", truncation=RECOMPUTE, append=True)
    output = answers(run(engine))
    check_turn(engine, dense, "next", new, output["next"])
    for name in (*others, "fork"):
        exact = teacher_forced(model, [*seen, *new], output[name])
        assert error_of(logits_of(engine, name), exact) <= EXACT_TOLERANCE, name
    exact = teacher_forced(model, dense.visible() + new, output["recompute"])
    assert error_of(logits_of(engine, "recompute"), exact) <= EXACT_TOLERANCE
    approximate = teacher_forced(model, [*seen, *new], output["next"])
    assert error_of(logits_of(engine, "next"), approximate) > 100 * EXACT_TOLERANCE


def test_sliding_windows_refuse_what_they_would_hide(checkpoints: dict[str, tuple[Path, Any]]) -> None:
    engine = engine_of(checkpoints["mistral"][0])
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
