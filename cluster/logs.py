"""Where log lines go: those of an ingress or a replica to Serve's log of that process, those of `--local` to stderr.

Serve takes the process's standard error apart into lines of its own; what goes there arrives in pieces. With
`log_format: json` each line is an object; that of a request has what `log_request` is given below `request`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_SERVE = "ray.serve"  # the logger that Serve tells applications to use
_requests = logging.getLogger("mneme.requests")


class _ToServe(logging.Handler):
    """Records as they are, tracebacks whole; looks Serve's handlers up each time, as Serve replaces them."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger(_SERVE).handle(record)


class _JsonLines(logging.Formatter):
    """The names are those of Ray's formatter."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"asctime": at, "levelname": record.levelname, "name": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["exc_text"] = self.formatException(record.exc_info)
        request = getattr(record, "request", None)
        return json.dumps(line if request is None else {**line, "request": request})


def log_to_serve() -> None:
    """Send what `mneme` logs at INFO and above to Serve's handlers; may be called twice."""
    logger = logging.getLogger("mneme")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not any(isinstance(handler, _ToServe) for handler in logger.handlers):
        logger.addHandler(_ToServe())


def log_to_stderr(log_format: str) -> None:
    """Send warnings of this process to stderr; as JSON, what `mneme` logs at INFO too: it is for machines to read."""
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(_JsonLines())
        logging.getLogger("mneme").setLevel(logging.INFO)
    else:
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


def log_request(line: Mapping[str, Any]) -> None:
    """Log a request that has been answered, or whose client is gone: a line for each, never with text of it.

    line  id, given_id, tenant, method, path, status, outcome, total_ms, and of those that were generated for what
          `ShownRequest` says of tokens by source, times and replica
    """
    _requests.info(
        "%s %r %s request=%s given_id=%s tenant=%s outcome=%s ms=%.1f",  # a path may have the end of a line in it
        *(line[name] for name in ("method", "path", "status", "id", "given_id", "tenant", "outcome", "total_ms")),
        extra={"request": line},
    )
