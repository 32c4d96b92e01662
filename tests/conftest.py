"""Settings of every test process: one thread per process, no hub, and Ray's authentication stated, not inherited.

Without a GPU Triton kernels run in Triton's interpreter. It reads its variable when triton is first imported, which any
test may cause, so the choice is made here; what compiles kernels does so in a process of its own, without the variable.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # spinning threads of several processes starve each other
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import hypothesis
import pytest
import torch

# How long an example takes decides nothing. Where a change is judged (CI=true), its examples are the same each time.
hypothesis.settings.register_profile("any-machine", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("any-machine")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """What made a test be tried again is shown, too."""
    if str(report.outcome) == "rerun":  # pytest-rerunfailures' own
        print(f"\n{report.nodeid} is tried again:\n{report.longreprtext}", file=sys.__stdout__, flush=True)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers, one runs all that starts a Ray cluster, first; other files go to whichever is idle.

    Where a change is judged (CI=true), what fails beside a real cluster is tried once more, so that one
    stall of a machine does not hide what the others say; the first failure is printed, and is a defect all the same.
    """
    if "CI" in os.environ:
        for item in items:
            if item.get_closest_marker("e2e"):
                item.add_marker(pytest.mark.flaky(reruns=1))
    if not config.getoption("loadgroup", False):  # what --dist loadgroup is called in a worker
        return
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ray" if item.get_closest_marker("e2e") else item.path.stem))
