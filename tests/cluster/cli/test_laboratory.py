"""Commands of the laboratory: found by entry points, imported only when they are named, and missed in one line."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from mneme.cluster.cli import main as command_line
from mneme.cluster.cli.main import LABORATORY, main


def test_help_lists_its_commands_without_importing_them() -> None:
    code = (
        "import sys; from mneme.cluster.cli.main import main\n"
        "try: main(['--help'])\n"
        "finally: print(any(each.startswith('mneme.lab') for each in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
    assert all(f"    {name} " in done.stdout for name in LABORATORY)


@pytest.mark.parametrize("name", LABORATORY)
def test_each_command_says_what_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: mneme {name} ")


@pytest.mark.parametrize("found", [[], [EntryPoint("bench", "no_such_package:add", "mneme.commands")]])
def test_what_is_not_installed_is_said_in_one_line_and_others_run_without_it(
    found: list[EntryPoint], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "entry_points", lambda **_: found)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--url", "http://x"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'mneme[lab]'" in line
    assert main(["serve", "--print-config"]) == 0
