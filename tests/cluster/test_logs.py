"""What our code logs in Serve's processes reaches Serve's log: at INFO, whole, and once."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from mneme.cluster.logs import log_request, log_to_serve, log_to_stderr


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    ours, serves = logging.getLogger("mneme"), logging.getLogger("ray.serve")
    before = [(logger, logger.level, logger.propagate, list(logger.handlers)) for logger in (ours, serves)]
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    serves.handlers = [handler]
    serves.propagate = False
    yield written
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


def test_lines_at_info_arrive_once(log: io.StringIO) -> None:
    log_to_serve()
    log_to_serve()
    logging.getLogger("mneme.cluster.x").info("refused request_id=%s status=%d", "r", 400)
    logging.getLogger("mneme.cluster.x").debug("never")
    assert log.getvalue() == "INFO mneme.cluster.x refused request_id=r status=400\n"


def test_a_traceback_is_one_record(log: io.StringIO) -> None:
    log_to_serve()
    try:
        raise ValueError("on purpose")
    except ValueError:
        logging.getLogger("mneme.router").exception("failed request_id=%s", "r")
    first, *rest = log.getvalue().splitlines()
    assert first == "ERROR mneme.router failed request_id=r"
    assert rest[0] == "Traceback (most recent call last):"
    assert rest[-1] == "ValueError: on purpose"


def test_handlers_that_serve_replaces_are_followed(log: io.StringIO) -> None:
    log_to_serve()
    later = io.StringIO()
    logging.getLogger("ray.serve").handlers = [logging.StreamHandler(later)]
    logging.getLogger("mneme").info("here")
    assert (log.getvalue(), later.getvalue()) == ("", "here\n")


def test_json_lines_are_objects_and_text_says_warnings_alone(
    log: io.StringIO, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    line = {"id": "r", "given_id": None, "tenant": "a", "method": "GET", "path": "/\n", "status": 200}
    line |= {"outcome": "ok", "total_ms": 1.0}
    log_to_stderr("text")
    log_request(line)
    logging.getLogger("mneme").warning("here")
    assert capsys.readouterr().err == "WARNING mneme: here\n"
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log_to_stderr("json")
    log_request(line)
    try:
        raise ValueError("on purpose")
    except ValueError:
        logging.getLogger("mneme.x").exception("failed")
    request, failed = map(json.loads, capsys.readouterr().err.splitlines())
    assert (request["name"], request["request"]) == ("mneme.requests", line)
    assert "ValueError: on purpose" in failed["exc_text"]
