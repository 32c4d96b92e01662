"""What `mneme serve` leaves of a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import tempfile

import pytest

from tests.e2e.server_process import REPOSITORY, SERVE_FAKE, free_port

pytestmark = pytest.mark.e2e
CURSOR = b"\x1b[?25h"


def test_ctrl_c_during_the_start_takes_the_bar_away_and_gives_the_cursor_back() -> None:
    ours, theirs = pty.openpty()
    paths = f"{REPOSITORY / 'src'}:{REPOSITORY}"
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as temporary:
        process = subprocess.Popen(
            [*SERVE_FAKE, f"port={free_port()}"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TMPDIR": temporary, "TERM": "xterm", "PYTHONPATH": paths},
            cwd=REPOSITORY,
            start_new_session=True,
        )
        os.close(theirs)
        shown = _read_until(ours, b"starting replicas")
        os.killpg(process.pid, signal.SIGINT)
        shown += _read_until(ours, None)
        assert process.wait(60) == 130
        os.close(ours)
    after = shown.rpartition(CURSOR)[2]
    assert after.count(b"\n") == 1
    assert after.endswith(b"\x1b[2Kmneme serve: stopped\r\n")  # the bar's line is erased
    assert b"Traceback" not in shown


def _read_until(terminal: int, text: bytes | None) -> bytes:
    """All that is shown until a text is, or to the end."""
    shown = b""
    while text is None or text not in shown:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # how Linux says that nobody has the other end
            part = b""
        if not part:
            assert text is None, shown
            break
        shown += part
    return shown
