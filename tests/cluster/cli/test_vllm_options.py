"""Options of vLLM's start scripts: what stands in their place is set, or said before anything is loaded."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import yaml

from mneme.cluster.cli.main import main
from mneme.errors import ConfigError
from mneme.replicas.config import EngineConfig
from mneme.replicas.vllm_options import FOREIGN, engine_keys


def engine_of(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, Any], str]:
    assert main(["serve", *options, "--print-config"]) == 0
    shown = capsys.readouterr()
    return yaml.safe_load(shown.out)["engine"], shown.err


def test_what_is_done_anyway_changes_nothing_and_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = engine_of(capsys)
    with_them, said = engine_of(capsys, "mneme-tiny", "--tensor-parallel-size", "1", "--kv-cache-dtype=auto")
    assert with_them == plain
    for option in ("--tensor-parallel-size", "--kv-cache-dtype"):
        assert f"mneme serve: {option} changes nothing" in said
    assert engine_of(capsys, "mneme-tiny", "-tp", "1", "--dtype", "half")[0] == {**plain, "dtype": "float16"}


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [("--no-enable-prefix-caching", "prefix_sharing", False), ("--no-enforce-eager", "cuda_graphs", True)],
)
def test_a_flag_sets_the_key_that_is_its(
    option: str, key: str, value: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    opposite = f"engine.{key}={'false' if value else 'true'}"
    engine, said = engine_of(capsys, "--set", opposite, option)
    assert (engine[key], said) == (value, "")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--gpu-memory-utilization", "0.9"], "in its place: --set engine.kv_cache_bytes=..."),
        (["--kv-cache-dtype", "fp8"], "in its place: --set engine.kv_dtype=..."),
        (["--tensor-parallel-size", "2", "./model"], "`mneme serve --replicas N` runs several"),
        (["--trust-remote-code"], "--trust-remote-code: is not supported (got True); no code of a model is run"),
        (["--no-enable-chunked-prefill"], "--no-enable-chunked-prefill: is not supported"),
    ],
)
def test_what_is_not_honoured_is_refused(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *options]) == 2
    shown = capsys.readouterr()
    assert told in shown.err
    assert shown.err.startswith(f"mneme serve: {options[0]}")
    assert (shown.err.count("\n"), shown.out) == (1, "")


@pytest.mark.parametrize("name", FOREIGN)
def test_no_option_is_taken_and_not_honoured(name: str) -> None:
    keys = {each.name for each in fields(EngineConfig)}
    foreign = FOREIGN[name]
    assert foreign.instead in keys or not foreign.instead.isidentifier()
    assert not foreign.is_opposite or foreign.is_flag
    for value in foreign.anyway:
        assert engine_keys(name, value, name, "{}") == {}
    assert not foreign.is_same or foreign.instead in keys
    if not ((foreign.is_flag or foreign.is_same) and foreign.instead in keys):
        with pytest.raises(ConfigError, match=name):
            engine_keys(name, "something else", name, "{}")
