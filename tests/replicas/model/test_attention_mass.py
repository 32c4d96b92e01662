"""What `important` keeps: the attention mass of a path is that of the dense computation, and never of stale slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.directory import load_model_config
from mneme.replicas.sequence import Sequence
from mneme.replicas.truncation import Truncation
from tests.budget import rarer
from tests.replicas.checkpoints import write_checkpoint
from tests.replicas.model.dense_session import DenseSession
from tests.replicas.schedule.test_truncating_model import REUSE, check_turn, engine_of
from tests.replicas.tiered_engine import answers, draw, run, submit, usages

MODELS = ("llama-2", "llama-yarn", "qwen3", "mistral", "qwen2-window")
WINDOW = 128
IMPORTANT = Truncation(keep="important", keep_first=2)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    directories = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    return {name: (directory, write_checkpoint(name, directory)) for name, directory in directories.items()}


def masses_of(engine: Engine) -> list[float] | None:
    """Return the masses of the running sequence."""
    [sequence] = engine.scheduler.running
    assert sequence.path is not None
    return engine.runner.attention_mass(sequence.path, sequence.context)


def output_of(sequence: Sequence) -> list[int]:
    return sequence.ids[sequence.num_prompt :]


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("num_steps", [1, 60, *rarer([20, 100])])
def test_masses_are_those_of_dense_attention(
    checkpoints: dict[str, tuple[Path, Any]], model_name: str, num_steps: int
) -> None:
    """Before a truncation, after one, after two; and asking changes no later logits."""
    directory, model = checkpoints[model_name]
    engine = engine_of(directory, window=48)
    ids = draw(4, 21)
    submit(engine, "t", ids, 110, session_id="s", truncation=REUSE)
    for _ in range(num_steps):
        engine.step()
    [sequence] = engine.scheduler.running
    dense = DenseSession(model, 48, REUSE, load_model_config(directory).windows)
    dense.begin_turn(ids)
    for token_id in output_of(sequence):
        dense.step()
        dense.take(token_id)
    masses = masses_of(engine)
    assert masses is not None
    theirs = torch.tensor(dense.attention_mass())
    assert (torch.tensor(masses) - theirs).abs().max() <= 1e-4 * theirs.max()
    num_rows, config = min(32, len(masses)), load_model_config(directory)
    assert sum(masses) == pytest.approx(num_rows * config.num_layers * config.num_q_heads, rel=1e-4)
    output = output_of(sequence) + answers(run(engine))["t"]
    fresh = DenseSession(model, 48, REUSE, config.windows)
    check_turn(engine, fresh, "t", ids, output)


@pytest.mark.parametrize("model_name", ["qwen3"])
def test_important_tokens_stay(checkpoints: dict[str, tuple[Path, Any]], model_name: str) -> None:
    """Every kept run has a delta of its own, and the next truncation looks at them where they stand by then."""
    directory, model = checkpoints[model_name]
    engine = engine_of(directory, window=WINDOW)
    dense, oldest = DenseSession(model, WINDOW, IMPORTANT), DenseSession(model, WINDOW, Truncation(keep_first=2))
    for turn, (num_new, num_tokens) in enumerate([(70, 130), (40, 120)]):
        ids, name = draw(turn, num_new), f"t{turn}"
        submit(engine, name, ids, num_tokens, session_id="s", truncation=IMPORTANT, append=turn > 0)
        output = answers(run(engine))
        check_turn(engine, dense, name, ids, output[name])
        if turn == 0:
            with pytest.raises(AssertionError):
                check_turn(engine, oldest, name, ids, output[name])
    assert dense.num_truncations >= 3


def test_what_is_not_computed_yet_has_no_mass(checkpoints: dict[str, tuple[Path, Any]]) -> None:
    """Its slots hold nothing, or what an earlier owner of the page left."""
    engine = engine_of(checkpoints["llama-2"][0], window=WINDOW)
    submit(engine, "old", draw(1, 100), 2)
    run(engine)
    engine.forest.clear()
    submit(engine, "t", draw(2, 100), 20)
    chunks = engine.scheduler.schedule()
    [sequence] = engine.scheduler.running
    assert not sequence.path.is_on_device()
    inputs = engine.runner.prepare(chunks, engine.forest.store.drain_moves())
    engine.runner.forward(inputs)
    assert sequence.path.is_on_device()
    assert masses_of(engine) is not None
    sequence.append(7)
    engine.scheduler.schedule()  # takes a slot in a page that is there
    assert sequence.path.is_on_device()
    assert masses_of(engine) is None


def test_a_turn_whose_past_is_computed_in_the_same_step(checkpoints: dict[str, tuple[Path, Any]]) -> None:
    """It follows another session's rows; their pages hold the keys of an earlier owner until the step runs."""
    directory, model = checkpoints["llama-2"]
    engine = engine_of(directory, window=WINDOW, num_pages=20)
    shared, dense = draw(1, 90), DenseSession(model, WINDOW, IMPORTANT)
    for name in ("a", "b"):
        submit(engine, f"{name}0", shared, 8, session_id=name, truncation=IMPORTANT)
    output = answers(run(engine))
    check_turn(engine, dense, "b0", shared, output["b0"])
    for name in ("c", "d"):
        submit(engine, name, draw(ord(name), 110), 8)
    run(engine)
    engine.forest.clear()
    submit(engine, "a1", draw(5, 4), 5, session_id="a", truncation=IMPORTANT, append=True)
    submit(engine, "b1", draw(6, 60), 5, session_id="b", truncation=IMPORTANT, append=True)
    events = run(engine)
    output, usage = answers(events), usages(events)
    assert usage["b1"].truncated_tokens > 0
    dense.masses_are_known = False  # in that step the oldest go
    dense.step()  # the first session computed the answer's last token as well, before anything was dropped
    check_turn(engine, dense, "b1", draw(6, 60), output["b1"])
