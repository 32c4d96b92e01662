"""Sends the lines that an ingress or a replica logs to Serve's log of that process.

Serve takes the process's standard error apart into lines of its own; what goes there arrives in pieces.
"""

from __future__ import annotations

import logging

_SERVE = "ray.serve"  # the logger that Serve tells applications to use


class _ToServe(logging.Handler):
    """Records as they are, tracebacks whole; looks Serve's handlers up each time, as Serve replaces them."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger(_SERVE).handle(record)


def log_to_serve() -> None:
    """Send what `mneme` logs at INFO and above to Serve's handlers; may be called twice."""
    logger = logging.getLogger("mneme")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not any(isinstance(handler, _ToServe) for handler in logger.handlers):
        logger.addHandler(_ToServe())
