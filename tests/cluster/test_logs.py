"""What our code logs in Serve's processes reaches Serve's log: at INFO, whole, and once."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from mneme.cluster.logs import log_to_serve


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
