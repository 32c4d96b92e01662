"""What our code logs in Serve's processes reaches Serve's log: at INFO, and once."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from mneme.cluster.logs import log_to_serve


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
