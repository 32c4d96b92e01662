"""The cluster's configuration: file, assignments and options, in this order; strict everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from mneme.cluster.cli import main
from mneme.cluster.config import ClusterConfig, load_config
from mneme.cluster.serve_status import raised_in
from mneme.config import parse
from mneme.errors import ConfigError


def test_the_defaults_serve_the_embedded_model_on_loopback() -> None:
    config = load_config()
    assert (config.model, config.replicas, config.host, config.port) == ("mneme-tiny", 2, "127.0.0.1", 8000)


def test_assignments_beat_the_file_and_options_beat_both(tmp_path: Path) -> None:
    file = tmp_path / "mneme.yaml"
    file.write_text("replicas: 3\nport: 9000\nengine:\n  page_size: 16\n  dtype: float32\n")
    config = load_config(file, ["port=9001", "engine.page_size=64"], {"port": 9002})
    assert (config.replicas, config.port) == (3, 9002)
    assert (config.engine.page_size, config.engine.dtype) == (64, "float32")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("replicaz=2", "replicaz: unknown key"),
        ("engine.pages=2", "engine.pages: unknown key"),
        ("replicas=two", "replicas: must be of type int"),
        ("replicas=0", "replicas: must be from 1"),
        ("port=70000", "port: must be from 1 to 65535"),
        ("engine.truncation.ratio=1", "engine.truncation.ratio: must be a number over 0 and under 1"),
        ("engine.truncation.keep=best", "engine.truncation.keep: must be one of system, important"),
        ("engine.warm_prompts=[{}]", "warm_prompts: each has either a system prompt or a text"),
        ("engine.warm_prompts=hello", "engine.warm_prompts: must be a list"),
        ("engine.max_pinned_share=2", "engine.max_pinned_share: must be from 0 to 1"),
        ("router.load_factor=0.5", "router.load_factor: must be from 1"),
        ("ray.object_store_bytes=1", "ray.object_store_bytes: must be from"),
        ("model=", "model: must be of type str"),
        ("replicas", "must read key=value"),
        ("served_name=''", "served_name: must not be empty"),
        ("model=/", "model: '/' has no name of its own"),
        ("engine.dtype=[", "--set 'engine.dtype=.': the value is not valid YAML"),
        ("engine.dtype='", "the value is not valid YAML"),
        ("engine.dtype=*a", "the value is not valid YAML"),
        ("engine.dtype=!!python/name:os.system", "the value is not valid YAML"),
        ("engine.dtype=a\0b", "the value is not valid YAML"),
        ("port=2026-99-99", "the value is not valid YAML"),
        ("port=" + "9" * 5000, "the value is not valid YAML"),
        ("port=" + "[" * 5000, "the value is not valid YAML"),
        ("start_timeout_s=1" + "0" * 400, "start_timeout_s: is too large"),
        ("start_timeout_s=.inf", "start_timeout_s: must be from 1"),
        ("start_timeout_s=.nan", "start_timeout_s: must be from 1"),
        ("port=1" + "0" * 400, "port: must be from 1 to 65535"),
    ],
)
def test_what_breaks_a_rule_is_named(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load_config(None, [assignment])
    assert len(str(raised.value).splitlines()) == 1
    assert len(str(raised.value)) < 300


def test_a_bad_assignment_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--set", "engine.dtype=["]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("mneme serve: --set 'engine.dtype=['")
    assert shown.err.count("\n") == 1


def test_the_mapping_parses_back_to_an_equal_configuration() -> None:
    assignments = ["engine.page_size=16", "http.api_keys=[a, b]", "router.move_tokens=128"]
    assignments += [
        "engine.warm_prompts=[{system: be brief}, {text: a b, ttl_s: 60}]",
        "engine.truncation.keep_first=4",
    ]
    config = load_config(None, assignments)
    assert (len(config.engine.warm_prompts), config.engine.truncation.keep_first) == (2, 4)
    assert parse(ClusterConfig, config.as_mapping()) == config


def test_the_served_name_hides_the_path() -> None:
    assert load_config(None, ["model=/models/llama-3"]).model_name == "llama-3"
    assert load_config(None, ["served_name=mine"]).model_name == "mine"


def test_a_relative_directory_has_the_name_that_it_resolves_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "llama-4"
    (directory / "below").mkdir(parents=True)
    monkeypatch.chdir(directory)
    assert load_config(None, ["model=."]).model_name == "llama-4"
    assert load_config(None, ["model=below/.."]).model_name == "llama-4"
    assert load_config(None, ["model=below/"]).model_name == "below"


def test_the_reason_of_a_failed_deployment_is_its_last_exception() -> None:
    message = (
        "The deployment failed to start 3 times in a row.\n"
        "RuntimeError: Traceback (most recent call last):\n"
        '  File "replica.py", line 1, in load\n'
        "mneme.errors.CheckpointError: model.layers.0: has shape [1], not [2]\n"
    )
    assert raised_in(message) == "CheckpointError: model.layers.0: has shape [1], not [2]"
    assert raised_in("Deployment is updating.") is None
