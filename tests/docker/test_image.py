"""docker/Dockerfile: what it is made of, and that its steps make a server that answers. No test of these has Docker."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from mneme.cluster.cli.main import main
from tests.docker.dockerfile import (
    ROOT,
    Build,
    Step,
    command_of,
    context,
    last,
    steps_of,
)
from tests.e2e.server_process import free_port, running

TARGETS = ("cpu", "cuda")
PASSED_ON = ("PIP_", "HTTP", "http", "NO_PROXY", "no_proxy", "SSL_", "LANG")  # how pip finds packages here


def test_the_context_is_the_package_and_what_it_is_installed_with() -> None:
    found = list(context())
    folders = {path.name for path in (ROOT / "src" / "mneme").iterdir() if path.is_symlink()}
    assert {path.parts[0] for path in found} == {"LICENSE", "README.md", "pyproject.toml", "docker", "src", *folders}
    assert {path.suffix for path in found if path.parts[0] == "docker"} == {".txt"}
    assert not [path for path in found if {"__pycache__", "mneme.egg-info"} & {*path.parts}]
    assert {Path("src/mneme", folder) for folder in folders} <= {*found}  # as links


@pytest.mark.parametrize("target", TARGETS)
def test_a_change_of_the_source_installs_no_package_again(target: str) -> None:
    """Each step is done again if one before it changed, and `COPY . .` has the source."""
    steps = steps_of(target)
    behind = steps[steps.index(Step("COPY", ". .")) + 1 :]
    assert [step.text.split()[:2] for step in behind if step.keyword == "RUN"] == [["pip", "install"]]
    assert all("--no-index --no-deps" in step.text for step in behind if step.keyword == "RUN")


@pytest.mark.parametrize("target", TARGETS)
def test_a_container_serves_as_a_plain_user(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    steps = steps_of(target)
    assert last(steps, "USER") == "1000"
    program, *arguments = command_of(steps)
    assert program == "mneme"
    assert main([*arguments, "--print-config"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "host: 0.0.0.0" in said
    assert f"port: {last(steps, 'EXPOSE')}" in said
    assert f"http://127.0.0.1:{last(steps, 'EXPOSE')}/health" in last(steps, "HEALTHCHECK")


def python_of(image: str) -> str:
    """Return this machine's interpreter of the image's version, of which the hashes are; else skip."""
    match = re.match(r"python:([\d.]+)-slim", image)
    assert match is not None, image
    found = sys.executable if sys.version.startswith(f"{match[1]}.") else shutil.which(f"python{match[1]}")
    if found is None or not (sys.platform == "linux" and os.uname().machine == "x86_64"):
        pytest.skip(f"the image's packages are for Python {match[1]} on Linux x86_64")
    return found


@pytest.mark.slow
@pytest.mark.e2e
def test_its_steps_make_a_server_that_answers(tmp_path: Path) -> None:
    """It listens to this machine alone, on a port that is free, and is otherwise what a container starts.

    The image's packages are those of this environment, which are of the same versions (`test_requirements.py`).
    """
    steps = steps_of("cpu")
    environment = tmp_path / "python"
    subprocess.run([python_of(steps[0].text), "-m", "venv", environment], check=True, timeout=600)
    (packages,) = environment.glob("lib/python3*/site-packages")
    shutil.rmtree(packages / "setuptools", ignore_errors=True)  # an old one comes with Python 3.11
    (packages / "here.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    passed_on = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    own = {"HOME": str(tmp_path / "image/home/mneme"), "PIP_NO_COMPILE": "1"}  # a minute less: it compiles what it runs
    build = Build(tmp_path / "image", environment / "bin", passed_on | own)
    for step in steps:
        if "--require-hashes" not in step.text:
            build.do(step)
    assert not [step.text for step in build.left_out if "pip" in step.text or "COPY" in step]
    for name in ("haproxy", "mneme-haproxy"):
        assert os.access(environment / "bin" / name, os.X_OK)

    program, *arguments = command_of(steps)
    found = shutil.which(program, path=build.environment["PATH"])
    assert found is not None
    door = ("--host", "127.0.0.1", "--port", str(free_port()))
    with running(found, *arguments, *door, **build.environment, PYTHONPATH="") as server:
        url = server.await_ready()
        probed = re.search(r"http://127\.0\.0\.1:\d+(/\w+)", last(steps, "HEALTHCHECK"))
        assert probed is not None
        assert httpx.get(url + probed[1]).json()["status"] == "ok"
        asked = {"model": "mneme-tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] > 0
        server.stop(signal.SIGTERM)
        assert server.process.returncode == 0, server.lines
    assert [*(build.workdir / ".cache" / "mneme").glob("libmneme_*.so")]  # compiled where it runs
