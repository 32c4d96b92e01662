"""What the processes of an instance inherit."""

from __future__ import annotations

import os

import pytest

from mneme.cluster.environment import apply


def test_an_instance_joins_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RAY_ADDRESS": "ray://elsewhere:10001", "HOME": "/"})
    for _ in range(2):  # the second time there is nothing to remove
        apply({"RAY_TMPDIR": "/x"})
        assert os.environ == {"RAY_TMPDIR": "/x", "HOME": "/"}
