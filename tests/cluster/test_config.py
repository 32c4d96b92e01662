"""The cluster's configuration: file, assignments and options, in this order; strict everywhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import mneme
from mneme.cluster.cli.main import main
from mneme.cluster.config import ClusterConfig, load_config
from mneme.cluster.serve.start_failure import raised_in
from mneme.config import parse
from mneme.errors import CheckpointError, ConfigError
from mneme.replicas.model.directory import model_directory


def test_the_defaults_serve_the_embedded_model_on_loopback() -> None:
    config = load_config()
    assert (config.model, config.replicas, config.host, config.port) == ("mneme-tiny", None, "127.0.0.1", 8000)


def test_assignments_beat_the_file_and_options_beat_both(tmp_path: Path) -> None:
    file = tmp_path / "mneme.yaml"
    file.write_text("replicas: 3\nport: 9000\nengine:\n  page_size: 16\n  dtype: float32\n")
    config = load_config(file, ["port=9001", "engine.page_size=64"], {"port": 9002})
    assert (config.replicas, config.port) == (3, 9002)
    assert (config.engine.page_size, config.engine.dtype) == (64, "float32")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("replicaz=2", r"^replicaz: unknown key; did you mean replicas\?$"),
        ("engine.page_sise=2", r"^engine.page_sise: unknown key; did you mean page_size\?$"),
        ("dtype=float32", r"^dtype: unknown key; did you mean engine.dtype\?$"),
        ("ingress.zzz=2", "ingress.zzz: unknown key; known are replicas, cpus"),
        ("zzz=2", "zzz: unknown key; known are, among others, "),
        ("cache.disk.folder=/tmp/x", r"^cache.disk.capacity_bytes: must be given$"),
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
        ("ray.address=nowhere", "ray.address: must be auto or HOST:PORT"),
        ("model=", "model: must be of type str"),
        ("replicas", "must read key=value"),
        ("served_name=''", "served_name: must not be empty"),
        ("served_name=[]", "served_name: must not be empty"),
        ("served_name=[a, '']", "served_name: must not be empty"),
        ("served_name=[a, 5]", r"served_name\[1\]: must be of type str"),
        ("engine.generation_config=vllm", "engine.generation_config: must be one of auto, none"),
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


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([{}], "models[0].model: must be given"),
        ([{"model": "/m/a", "port": 1}], "models[0].port: unknown key"),
        ([{"model": "/m/a"}, {"model": "/m/b", "replicas": 0}], "models[1].replicas: must be from 1"),
        ([{"model": "/m/a", "replicas": 1, "autoscale": {"max": 2}}], "models[0].replicas: must not be given beside"),
        ([{"model": "mneme-tiny"}], "models[0].served_name: two models are called 'mneme-tiny'"),
        ([{"model": "/m/a"}, {"model": "/n/a"}], "models[1].served_name: two models are called 'a'"),
        (
            [{"model": "/m/a"}, {"model": "m", "served_name": ["b", "a"]}],
            "models[1].served_name: two models are called",
        ),
        ([{"model": "/m/a", "engine": {"session_ttl_s": 5}}], "models[0].engine.session_ttl_s: must be the first"),
        ({"model": "/m/a"}, "models: must be a list"),
    ],
)
def test_a_further_model_that_breaks_a_rule_is_named_with_its_place(models: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(ClusterConfig, {"models": models})


def test_each_model_is_a_cluster_of_its_own_with_the_same_door() -> None:
    other = {"model": "/m/a", "replicas": 3, "engine": {"page_size": 32}}
    first, second = parse(ClusterConfig, {"port": 81, "engine": {"page_size": 64}, "models": [other]}).each_model()
    assert (first.model_name, first.models, first.engine.page_size) == ("mneme-tiny", (), 64)
    assert (second.model_name, second.replicas, second.engine.page_size, second.port) == ("a", 3, 32, 81)


def test_a_bad_assignment_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--set", "engine.dtype=["]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("mneme serve: --set 'engine.dtype=['")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, ": cannot be read: No such file or directory"),
        ("replicas: 2\nengine: [1, 2", ":2:14: is not valid YAML: \"expected ',' or ']', but got '<stream end>'\""),
        ("replicas: 2\n  port: 5\n", ":2:7: is not valid YAML: 'mapping values are not allowed here'"),
        ("port: 2026-99-99", ": is not valid YAML: 'month must be in 1..12"),
        (b"\xff\xfe\xff", ": is not text in UTF-8"),
        ("- 5", ": must be a mapping (got [5])"),
    ],
)
def test_a_file_that_is_no_configuration_is_named_with_the_place(
    content: str | bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mneme.yaml"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["serve", "--config", str(file)]) == 2
    shown = capsys.readouterr().err
    assert f"{file}{message}" in shown
    assert shown.count("\n") == 1


def test_the_printed_configuration_has_every_key_and_parses_back(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["http.api_keys=[a, b]", "engine.warm_prompts=[{system: be brief}, {text: a b, ttl_s: 60}]"]
    keys += ["engine.truncation.keep_first=4", "router.move_tokens=128"]
    given = [word for key in keys for word in ("--set", key)]
    assert main(["serve", "m", "--port", "9000", *given, "--print-config"]) == 0
    printed = parse(ClusterConfig, yaml.safe_load(capsys.readouterr().out))
    assert printed == load_config(None, keys, {"model": "m", "port": 9000})
    assert (len(printed.engine.warm_prompts), printed.engine.truncation.keep_first) == (2, 4)


def test_options_of_vllm_are_keys_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--max-model-len", "512", "--served-model-name", "5", "--dtype", "float32", "--api-key", "7"]
    given += ["--max-num-seqs", "8", "--block-size", "16", "--max-num-batched-tokens", "64"]
    given += ["--kv-cache-memory-bytes", "1000000", "--generation-config", "none", "--set", "engine.page_size=64"]
    assert main(["serve", *given, "--print-config"]) == 0
    config = parse(ClusterConfig, yaml.safe_load(capsys.readouterr().out))
    assert (config.model_name, config.http.api_keys) == ("5", ("7",))
    engine = config.engine
    assert (engine.max_context, engine.dtype, engine.max_running, engine.page_size) == (512, "float32", 8, 16)
    assert (engine.max_batch_tokens, engine.kv_cache_bytes, engine.generation_config) == (64, 1_000_000, "none")


def test_a_name_on_the_hub_is_told_how_to_get_it() -> None:
    with pytest.raises(CheckpointError, match=r"hf download meta-llama/Llama-3\.1-8B --local-dir Llama-3\.1-8B"):
        model_directory("meta-llama/Llama-3.1-8B")
    for path in ("./meta-llama/Llama", "/meta-llama/Llama", "models/meta/Llama", "Llama"):
        with pytest.raises(CheckpointError, match=r"no such model directory .*\)$"):
            model_directory(path)


def test_the_command_says_its_version_and_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["-m", "mneme", "--version"], ["-m", "mneme.cluster.cli.main", "--version"]):
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == f"mneme {mneme.__version__}\n"
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "examples:" in shown
    assert all(f"    {command} " in shown for command in ("serve", "chat", "doctor", "simulate", "cache"))


def test_an_unknown_option_is_told_by_its_command_with_the_one_most_like_it(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["serve", "--replicsa", "2"], "mneme serve: unknown: --replicsa (did you mean --replicas?);"),
        (["serve", "--zzz=2"], "mneme serve: unknown: --zzz=2;"),
        (["cache", "stats", "--folder", "f", "--jsn"], "mneme cache stats: unknown: --jsn (did you mean --json?);"),
        (["--version-of"], "mneme: unknown: --version-of (did you mean --version?);"),
        (["serve", "--dtype", "int8"], "mneme serve: argument --dtype: invalid choice: 'int8'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        shown = capsys.readouterr().err
        assert shown.startswith(told)
        assert shown.endswith("--help` lists what there is\n")
        assert shown.count("\n") == 1


def test_a_shell_completes_commands_and_options(tmp_path: Path) -> None:
    printed = [sys.executable, "-m", "mneme", "--print-completion", "bash"]
    script = tmp_path / "completion"
    script.write_text(subprocess.run(printed, capture_output=True, text=True, timeout=60, check=True).stdout)
    for typed, offered in (
        *(("se", "serve"), ("serve --rep", "--replicas")),
        *(("serve --dtype float3", "float32"), ("simulate cache --po", "--policy")),
    ):
        words = typed.split()
        asked = f"source {script}; COMP_WORDS=(mneme {typed}); COMP_CWORD={len(words)}; _shtab_mneme; echo $COMPREPLY"
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == offered


def test_the_served_name_hides_the_path() -> None:
    assert load_config(None, ["model=/models/llama-3"]).model_name == "llama-3"
    assert load_config(None, ["served_name=mine"]).model_name == "mine"


def test_a_model_may_have_several_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = load_config(None, ["served_name=[mine, claude-haiku, mine]"])
    assert (config.model_name, config.model_names) == ("mine", ("mine", "claude-haiku"))
    assert load_config(None, ["model=/models/llama-3"]).model_names == ("llama-3",)
    assert main(["serve", "m", "--served-model-name", "a", "b", "--served-model-name", "c", "--print-config"]) == 0
    assert parse(ClusterConfig, yaml.safe_load(capsys.readouterr().out)).model_names == ("a", "b", "c")
    assert main(["serve", "--served-model-name", "a", str(tmp_path), "--print-config"]) == 2
    assert "is a directory; the model stands before this option" in capsys.readouterr().err


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
