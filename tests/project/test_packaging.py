"""The wheel, built from the source distribution, holds the package and nothing else, and runs from anywhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from mneme.cluster.cli.main import LABORATORY

pytestmark = pytest.mark.engine  # one of them serves the model

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, target: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(target)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return target / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built through the sdist, from a copy of the repository without anything that was built in it."""
    checkout = tmp_path_factory.mktemp("copy") / "mneme"
    left_out = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=left_out)
    sdist = build("build_sdist", checkout, tmp_path_factory.mktemp("sdist"))
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as tar:
        tar.extractall(unpacked, filter="data")
    [source] = unpacked.iterdir()
    return build("build_wheel", source, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_every_module_and_the_embedded_model(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"mneme", next(n for n in names if "dist-info" in n).split("/")[0]}
    for folder in ("kernels", "replicas", "router", "cluster", "lab"):
        modules = {f"mneme/{folder}/{path.name}" for path in (ROOT / folder).glob("*.py")}
        assert modules
        assert modules <= names
    model = {f"mneme/replicas/mneme_tiny/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")}
    assert model <= names
    assert {"mneme/cluster/http/fields.txt", "mneme/cluster/http/window/assets/docs.js"} <= names
    assert "mneme/py.typed" in names


def test_the_wheel_names_the_commands_of_the_laboratory(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (path,) = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
    parsed = ConfigParser()
    parsed.read_string(archive.read(path).decode())
    commands = dict(parsed["mneme.commands"])
    assert commands.keys() == LABORATORY.keys()
    modules = {f"{value.partition(':')[0].replace('.', '/')}.py" for value in commands.values()}
    assert modules <= set(archive.namelist())


def test_the_wheel_runs_where_the_repository_is_not(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mneme; from mneme import LLM; "
        "out = LLM('mneme-tiny').generate(['Hello'])[0]; print(mneme.__file__, len(out.outputs[0].token_ids) > 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == [str(tmp_path / "mneme" / "__init__.py"), "True"], done.stderr
