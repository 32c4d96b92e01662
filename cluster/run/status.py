"""Why a Serve application failed, in one line."""

from __future__ import annotations

import re

_RAISED = re.compile(r"^(?:[\w.]*\.)?(\w*(?:Error|Exception|Unavailable|Interrupt)): (.+)$")


def failure_reason() -> str | None:
    """The last exception that any deployment's status tells of; None when there is none."""
    from ray import serve

    messages = [
        deployment.message
        for application in serve.status().applications.values()
        for deployment in application.deployments.values()
    ]
    return next((reason for message in messages if (reason := raised_in(message)) is not None), None)


def raised_in(message: str) -> str | None:
    """The last `SomeError: text` line of a traceback."""
    for line in reversed(message.splitlines()):
        match = _RAISED.match(line.strip())
        if match is not None and match[1] != "RuntimeError":
            return f"{match[1]}: {match[2]}"
    return None
