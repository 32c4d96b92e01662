"""`mneme bench autoscale`: loads that rise and fall, what is said of replicas that follow, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mneme.cluster.cli.main import main
from mneme.lab.bench import autoscale
from mneme.lab.bench.autoscale import Replicas
from mneme.lab.bench.measure import Answer
from mneme.lab.bench.workloads import SHAPES, make_sessions
from tests.cluster.api_fixtures import serving


def test_sessions_arrive_as_often_as_the_profile_says() -> None:
    profile = autoscale.made_profile("step", rate=1, peak=10, seconds=600)
    sessions = make_sessions("sessions", SHAPES["sessions"]._replace(turns=1), autoscale.num_requests(profile), 0)
    arrived = np.array([each.turns[0].at_s for each in autoscale.arrive_by(profile, sessions, 0, 0)])
    at_peak = ((arrived >= 100) & (arrived < 300)).sum() / 200
    assert at_peak == pytest.approx(10, rel=0.1)
    assert (len(arrived) / 600 - at_peak / 3) / (2 / 3) == pytest.approx(1, rel=0.25)
    assert arrived.max() <= 600


def answer(session: str, sent_s: float, cached: int = 0, error: str | None = None) -> Answer:
    return Answer(
        session=session, sent_s=sent_s, first_s=sent_s + 0.1, last_s=sent_s + 0.2, prompt_tokens=100,
        cached_tokens=cached, output_tokens=2, ended_s=sent_s + 0.2, error=error,
    )  # fmt: skip


def test_what_clients_saw_stands_on_both_sides_of_a_change() -> None:
    """First turns have nothing to find, and others the turn before; a replica that answered late once has not gone."""
    counts = [3, 3, 2, 3, 3, 3, 1, 1, 1, 1]
    seen = [Replicas(100.0 + at, ready, ready) for at, ready in enumerate(counts)]
    answers = [answer("a", 100), answer("a", 104, 100), answer("a", 106.5, 50), answer("b", 107, error="HTTP 503")]
    found = autoscale.follow(answers, seen, window_s=4)
    (event,) = found["events"]
    assert (event["at_s"], event["from"], event["to"]) == (6, 3, 1)
    assert (event["before"]["hit_rate"], event["after"]["hit_rate"]) == (round(100 / 101, 4), round(50 / 101, 4))
    assert (event["before"]["num_failed"], event["after"]["num_failed"]) == (0, 1)
    assert found["hit_rate_kept_at_scale_down"] == pytest.approx(0.5, rel=1e-3)
    assert (found["replicas_least"], found["replicas_most"]) == (1, 3)
    assert len(autoscale.plots(answers, found, [(0, 1), (10, 1)])) == 3


def test_a_server_is_loaded_and_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = tmp_path / "all.json", tmp_path / "report.html"
    with serving() as server:
        arguments = ["--rate", "4", "--peak", "8", "--seconds", "3", "--think-time", "0", "--words", "4"]
        files = ["--out", str(out), "--report", str(report)]
        assert main(["bench", "autoscale", "--url", server.url, *arguments, *files, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["num_ok"] == figures["num_requests"] > 0
    assert (figures["replicas_least"], figures["replicas_most"], figures["events"]) == (2, 2, [])
    assert json.loads(out.read_text())["replicas"]
    assert report.read_text().count("<svg") == 9
