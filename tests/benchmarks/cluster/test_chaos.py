"""What bench_chaos.py says of what it saw: every promise can be missed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from bench_chaos import BadStream, checks_of, is_cut


@pytest.mark.parametrize(
    ("error", "is_broken"),
    [
        (httpx.ReadError(""), True),
        (httpx.RemoteProtocolError(""), True),
        (httpx.ReadTimeout(""), False),
        (BadStream("HTTP 500"), False),
    ],
)
def test_only_connections_that_broke_are_cut(error: Exception, is_broken: bool) -> None:
    assert is_cut(error, began_s=1.0, cut_s=2.0) == is_broken
    assert not is_cut(error, began_s=3.0, cut_s=2.0)


def sample(mib_by_process: dict[str, float], **totals: float) -> dict[str, Any]:
    return {"processes": {name: {"mib": mib, "fds": 60} for name, mib in mib_by_process.items()}, **totals}


def results(**changes: Any) -> dict[str, Any]:
    """A run in which all went well."""
    whole: dict[str, Any] = {
        "all": {"refused_after_s": 0.5, "refusal": [503, "1"], "recovered_after_s": 9.0, "stream_is_whole": True},
        "kills": [{"after_pieces": num, "kills": 8, "failed": 0, "wrong": 0, "pauses_s": [0.3] * 8} for num in (0, 5)],
        "load_beside_kills": {"num_wrong": 0, "num_failed": 0},
        "others": [{"fault": "node", "num_wrong": 0, "num_failed": 0}],
        "random": {"num_wrong": 0, "num_failed": 0, "growth": {"proxy mib": 0.01, "host_bytes": 0.2}, "samples": []},
    }
    for path, value in changes.items():
        part, _, key = path.partition("__")
        (whole[part][0] if isinstance(whole[part], list) else whole[part])[key] = value
    return whole


def missed(found: dict[str, Any]) -> list[str]:
    checks = checks_of(found, num_kills=16)
    json.dumps([check.value for check in checks], allow_nan=False)
    return [check.name for check in checks if check.ok is False]


def test_a_run_in_which_all_went_well_misses_nothing() -> None:
    assert missed(results()) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"kills__kills": 7}, "replicas killed that were answering"),
        ({"others__num_failed": 1}, "requests that failed"),
        ({"random__num_wrong": 1}, "answers with a wrong token"),
        ({"kills__pauses_s": [1.5] * 8}, "pause p95 of killed streams"),
        ({"all__refused_after_s": 1.1}, "all killed: refused after"),
        ({"all__refusal": [500, None]}, "all killed: refused after"),
        ({"all__recovered_after_s": 31.0}, "all killed: answered again"),
        ({"all__stream_is_whole": False}, "all killed: streams that are not whole"),
        ({"random__growth": {"proxy mib": 0.06}}, "growth of proxy mib"),
        ({"random__growth": {"disk_bytes": 0.2}}, "growth of disk_bytes"),
        ({"random__samples": [sample({}, host_bytes=2.0, host_capacity=1.0)]}, "fullest host"),
    ],
)
def test_each_promise_can_be_missed(change: dict[str, Any], name: str) -> None:
    assert missed(results(**change)) == [name]
