"""Settings of every test process, and the layer that each test belongs to.

One thread per process, no hub, and Ray's authentication stated, not inherited. Without a GPU Triton kernels run in
Triton's interpreter, which reads its variable when triton is first imported; what compiles kernels does so in a process
of its own, without the variable.

This file imports no torch, and no test of `policy` or `http` does: they are what `make check` runs. So where `-m` asks
for some layers alone, files of others are not even imported.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # spinning threads of several processes starve each other
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["XDG_STATE_HOME"] = os.devnull  # no test reads or writes KV of whoever runs it
if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not any(
    Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")
):
    os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest

# How long an example takes decides nothing. Where a change is judged (CI=true), its examples are the same each time.
hypothesis.settings.register_profile("any-machine", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("any-machine")

# A test's layer is that of its folder, the innermost that is named here, unless its file's `pytestmark` says another.
LAYER_BY_FOLDER = {
    ".": "policy",  # no model, no torch and no Ray
    "benchmarks": "lab",
    "cachetier": "tier",
    "cachetier/chunk": "policy",
    "cachetier/policy": "policy",
    "cluster/http": "http",
    "cluster/metrics": "http",
    "e2e": "e2e",
    "kernels": "kernels",
    "lab": "lab",
    "replicas/cache_faults": "tier",
    "replicas/model": "engine",
    "training": "lab",
}
LAYERS = set(LAYER_BY_FOLDER.values())
WITHOUT_TORCH = {"policy", "http"}
_FILE_MARKS = re.compile(r"^pytestmark = (.*)", re.MULTILINE)


@functools.cache
def layer_of_file(path: Path) -> str:
    """Return the layer of a file's tests."""
    marks = _FILE_MARKS.search(path.read_text())
    said = LAYERS.intersection(re.findall(r"\w+", marks[1])) if marks else set()
    folder = path.parent.relative_to(Path(__file__).parent)
    of_folder = (LAYER_BY_FOLDER[str(each)] for each in (folder, *folder.parents) if str(each) in LAYER_BY_FOLDER)
    return said.pop() if said else next(of_folder)


def layer_of(item: pytest.Item) -> str:
    """Return the layer of a test: its own mark's, or its file's."""
    said = (mark.name for mark in item.iter_markers() if mark.name in LAYERS)  # the closest first
    return next(said, None) or layer_of_file(item.path)


def layers_asked_for(config: pytest.Config) -> set[str]:
    """Return the layers that `-m` names; none where it excludes any, as then it asks for all others."""
    expression = config.option.markexpr
    excludes = re.search(rf"\bnot\b\s*(\(|({'|'.join(LAYERS)})\b)", expression)
    return set() if excludes else LAYERS.intersection(re.findall(r"\w+", expression))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files and folders of layers that are not asked for."""
    named = layers_asked_for(config)
    if not named or (collection_path.is_file() and collection_path.suffix != ".py"):
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return None if any(layer_of_file(file) in named for file in files) else True


def pytest_collection_finish(session: pytest.Session) -> None:
    """Assert that files of policy import neither torch nor Ray, where they are collected alone."""
    named = layers_asked_for(session.config)
    if named and named <= WITHOUT_TORCH:
        assert not {"torch", "ray"} & sys.modules.keys(), (
            "a file of policy imports torch or Ray; it is of another layer"
        )


@pytest.fixture(autouse=True)
def _no_torch_in_policy(request: pytest.FixtureRequest) -> Iterator[None]:
    """Assert that a test which is to run without torch does not import it; other layers of the process may have."""
    was_there = "torch" in sys.modules
    yield
    if not was_there and layer_of(request.node) in WITHOUT_TORCH:
        assert "torch" not in sys.modules, "a test of policy imports torch; mark it `engine` if it needs a model"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """What made a test be tried again is shown, too."""
    if str(report.outcome) == "rerun":  # pytest-rerunfailures' own
        print(f"\n{report.nodeid} is tried again:\n{report.longreprtext}", file=sys.__stdout__, flush=True)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups, and pytest the markers that are asked for, behind it
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test's layer. With several workers, one runs all that starts a Ray cluster, first, but for what names a
    group of its own; other files go to whichever is idle.

    Where a change is judged (CI=true), what fails beside a real cluster is tried once more, so that one
    stall of a machine does not hide what the others say; the first failure is printed, and is a defect all the same.
    """
    for item in items:
        item.add_marker(layer_of(item))
        if "CI" in os.environ and item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.flaky(reruns=1))
    if not config.getoption("loadgroup", False):  # what --dist loadgroup is called in a worker
        return
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("ray" if item.get_closest_marker("e2e") else item.path.stem))
