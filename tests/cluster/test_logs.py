"""What our code logs in Serve's processes reaches Serve's log: at INFO, and once."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from mneme.cluster.logs import log_request, log_to_serve, log_to_stderr


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("mneme", "ray.serve")]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


def test_lines_at_info_arrive_once_at_the_handlers_of_now() -> None:
    written, serves = io.StringIO(), logging.getLogger("ray.serve")
    serves.propagate = False
    log_to_serve()
    log_to_serve()
    serves.handlers = [logging.StreamHandler(written)]  # Serve replaces them
    logging.getLogger("mneme.cluster.x").info("refused request_id=%s status=%d", "r", 400)
    logging.getLogger("mneme.cluster.x").debug("never")
    assert written.getvalue() == "refused request_id=r status=400\n"


def test_json_lines_are_objects_and_text_says_warnings_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
