"""The cluster's configuration: file, assignments and options, in this order; strict everywhere."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from mneme.cachetier.config import DiskTierConfig
from mneme.cluster import config as config_module
from mneme.cluster.cli.main import main
from mneme.cluster.config import ClusterConfig, RayConfig, load_config
from mneme.config import parse
from mneme.errors import CheckpointError, ConfigError
from mneme.replicas.model.directory import model_directory


def test_assignments_beat_the_file_and_options_beat_both(tmp_path: Path) -> None:
    file = tmp_path / "mneme.yaml"
    file.write_text("replicas: 3\nport: 9000\nengine:\n  page_size: 16\n  dtype: float32\n")
    config = load_config(file, ["port=9001", "engine.page_size=64"], {"port": 9002})
    assert (config.replicas, config.port) == (3, 9002)
    assert (config.engine.page_size, config.engine.dtype) == (64, "float32")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("engine.page_sise=2", r"^engine.page_sise: unknown key; did you mean page_size\?$"),
        ("dtype=float32", r"^dtype: unknown key; did you mean engine.dtype\?$"),
        ("ingress.zzz=2", "ingress.zzz: unknown key; known are replicas, cpus"),
        ("zzz=2", "zzz: unknown key; known are, among others, "),
        ("cache.disk.folder=/tmp/x", r"^cache.disk.capacity_bytes: must be given$"),
        ("replicas=two", "replicas: must be of type int"),
        ("port=70000", "port: must be from 1 to 65535"),
        ("engine.truncation.ratio=1", "engine.truncation.ratio: must be a number over 0 and under 1"),
        ("engine.truncation.keep=best", "engine.truncation.keep: must be one of system, important"),
        ("engine.warm_prompts=[{}]", r"engine.warm_prompts\[0\]: must be of type str"),
        ("engine.warm_prompts=hello", "engine.warm_prompts: must be a list"),
        ("ray.address=nowhere", "ray.address: must be auto or HOST:PORT"),
        ("replicas", "must read key=value"),
        ("http.otlp_endpoint=localhost:4317", "http.otlp_endpoint: must begin with http"),
        ("served_name=[a, '']", "served_name: must not be empty"),
        ("served_name=[a, 5]", r"served_name\[1\]: must be of type str"),
        ("model=/", "model: '/' has no name of its own"),
        ("engine.dtype=[", "--set 'engine.dtype=.': the value is not valid YAML"),
        ("engine.dtype=!!python/name:os.system", "the value is not valid YAML"),
        ("engine.dtype=a\0b", "the value is not valid YAML"),
        ("port=" + "9" * 5000, "the value is not valid YAML"),
        ("port=" + "[" * 5000, "the value is not valid YAML"),
        ("start_timeout_s=1" + "0" * 400, "start_timeout_s: is too large"),
        ("start_timeout_s=.nan", "start_timeout_s: must be from 1"),
    ],
    ids=lambda given: given[:40],
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, ": cannot be read: No such file or directory"),
        ("replicas: 2\nengine: [1, 2", ":2:14: is not valid YAML: \"expected ',' or ']', but got '<stream end>'\""),
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
    keys = ["http.api_keys=[a, b]", "engine.warm_prompts=[be brief, be kind]"]
    keys += ["engine.truncation.keep_first=4", "router.policy=hash"]
    given = [word for key in keys for word in ("--set", key)]
    assert main(["serve", "m", "--port", "9000", *given, "--print-config"]) == 0
    printed = parse(ClusterConfig, yaml.safe_load(capsys.readouterr().out))
    assert printed == load_config(None, keys, {"model": "m", "port": 9000})
    assert (len(printed.engine.warm_prompts), printed.engine.truncation.keep_first) == (2, 4)


@pytest.mark.parametrize(
    ("said", "is_own"),
    [
        ((), True), (("cache.chunk_tokens=64",), True), (("cache.disk=null",), False),
        (("cache.enabled=false",), False),
        (("ray.address=auto",), False), (("cache.disk={folder: /kv, capacity_bytes: 1}",), False),
    ],
)  # fmt: skip
def test_a_server_on_one_machine_that_is_told_nothing_of_disks_has_its_own(said: tuple[str, ...], is_own: bool) -> None:
    own = DiskTierConfig(folder="/own", capacity_bytes=7)
    config = load_config(None, [*said], {}, lambda: own)
    assert (config.cache.disk == own) == is_own
    assert load_config(None, [*said]).cache.disk != own


@pytest.mark.parametrize(
    ("available_gib", "shm_gib", "store_gib"),
    [(16, 8, 4), (16, 2, 1.6), (0.1, 8, 0.1875), (16, 0.06, 0.1875), (900, 500, 64)],
)
def test_the_object_store_has_a_share_of_the_memory(
    available_gib: float, shm_gib: float, store_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much of it as shared memory has room for, and no less than Ray needs."""
    monkeypatch.setattr(config_module, "available_bytes", lambda: available_gib * 2**30)
    monkeypatch.setattr(config_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=shm_gib * 2**30))
    assert RayConfig().store_bytes() == pytest.approx(store_gib * 2**30)
    assert RayConfig(object_store_bytes=2**28).store_bytes() == 2**28


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


def test_an_unknown_option_is_told_by_its_command_with_the_one_most_like_it(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["serve", "--zzz=2"], "mneme serve: unknown: --zzz=2;"),
        (["cache", "stats", "--folder", "f", "--jsn"], "mneme cache stats: unknown: --jsn (did you mean --json?);"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        shown = capsys.readouterr().err
        assert shown.startswith(told)
        assert shown.endswith("--help` lists what there is\n")
        assert shown.count("\n") == 1


def test_a_model_may_have_several_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = load_config(None, ["served_name=[mine, claude-haiku, mine]"])
    assert (config.model_name, config.model_names) == ("mine", ("mine", "claude-haiku"))
    assert main(["serve", "m", "--served-model-name", "a", "b", "--served-model-name", "c", "--print-config"]) == 0
    assert parse(ClusterConfig, yaml.safe_load(capsys.readouterr().out)).model_names == ("a", "b", "c")
    assert main(["serve", "--served-model-name", "a", str(tmp_path), "--print-config"]) == 2
    assert "is a directory; the model stands before this option" in capsys.readouterr().err


def test_a_relative_directory_has_the_name_that_it_resolves_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "llama-4"
    (directory / "below").mkdir(parents=True)
    monkeypatch.chdir(directory)
    for given, name in ((".", "llama-4"), ("below/..", "llama-4"), ("below/", "below"), ("/models/llama-3", "llama-3")):
        assert load_config(None, [f"model={given}"]).model_name == name


def test_off_without_quotes_is_off() -> None:
    """YAML reads it as false."""
    assert load_config(assignments=["engine.blend.mode=off"]).engine.blend.mode == "off"
    with pytest.raises(ConfigError, match=r"engine.dtype: must be one of .* \(got False\)"):
        load_config(assignments=["engine.dtype=off"])
