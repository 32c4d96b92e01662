"""What `mneme serve` says of its traffic, and what a shell is told of commands and options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import mneme
from mneme.cluster.cli.main import main
from mneme.cluster.cli.serve import throughput_line


def service(prompt: int, cached: int, generated: int, *, running: int = 0) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "cached_tokens": cached, "generated_tokens": generated}
    return {**counts, "requests": {"running": running, "waiting": 0}, "kv_usage": 0.25}


def test_throughput_is_what_happened_between_two_looks() -> None:
    before = service(100, 40, 50)
    line = throughput_line(before, service(300, 90, 90, running=3), 10.0)
    assert line == (
        "prompt 20.0 tokens/s, generation 4.0 tokens/s, running 3, waiting 0, KV usage 25.0%, prefix hits 25.0%"
    )
    assert throughput_line(before, before, 10.0) is None
    assert throughput_line(before, service(0, 0, 0), 10.0) is None  # the replicas were replaced
    assert throughput_line(before, service(100, 40, 50, running=1), 10.0) is not None


def test_a_configuration_that_is_printed_takes_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed file is to be somebody's: a folder in it would be two servers'."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert main(["serve", "--print-config"]) == 0
    assert "disk" not in yaml.safe_load(capsys.readouterr().out)["cache"]  # null would be none at all
    assert main(["serve", "--print-config", "--set", "cache.disk=null"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["cache"]["disk"] is None
    assert not (tmp_path / "state").exists()


def test_a_shell_completes_commands_and_options() -> None:
    """Those of the laboratory, too, which are imported only when they are named."""
    printed = [sys.executable, "-m", "mneme", "--print-completion", "bash"]
    script = subprocess.run(printed, capture_output=True, text=True, timeout=60, check=True).stdout
    for typed, offered in (
        *(("se", "serve"), ("serve --rep", "--replicas")),
        *(("serve --dtype float3", "float32"), ("simulate cache --po", "--policy")),
    ):
        words = len(typed.split())
        asked = f"{script}\nCOMP_WORDS=(mneme {typed}); COMP_CWORD={words}; _shtab_mneme; echo $COMPREPLY"
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == offered


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"mneme {mneme.__version__}\n")
