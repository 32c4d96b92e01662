"""Has a model's quality report made at its first start, behind traffic, so that documents pay without being asked to.

`mneme quality` measures it in a process of its own with weights of its own, at the machine's lowest priority: what
fails there, or takes too much, fails there. It begins once the engine has had nothing to do for a minute, steps only
while that stays so, and ends with this process, whose pipe says when. One that has to pause for long ends, too, and
begins anew in the next idle minute. Until the report is there, all documents are computed in full.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from mneme.machine import available_bytes
from mneme.replicas.blend.gate import Gate

logger = logging.getLogger(__name__)

IDLE_S = 60.0  # until it begins: a client's think time, or the pause between two tests, is not the time for it
BUDGET_S = 1800.0  # of processor time, for all of it
LIMIT_S = 8 * BUDGET_S  # by the clock: of one that hangs
PAUSE_S = 300.0  # without an idle engine, after which its memory is given back
_MOST_BEGUN = 5  # that it begins anew: a server that is never idle for long has none made
MOST_BYTES = 1 << 30  # of weights: the budget is too small for larger models, which are measured by hand
_CORES = 4  # of so many it uses one
_SPARE_BYTES = 2 << 30  # beside the weights twice: its KV, and torch
_MEASURING = Gate(why="the quality report of this model is being measured")


class FirstReport:
    """One model's measurement; called on the engine's thread."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        read: Callable[[], Gate],
        weights_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin nothing yet.

        command  writes the report into `folder` while its standard input says so (`measuring`)
        read     reads it
        """
        self._command, self._folder, self._read, self._clock = command, folder, read, clock
        self._weights_bytes = weights_bytes
        self._idle_since_s, self._busy_since_s, self._began_s = math.inf, math.inf, math.inf
        self._is_over, self._goes, self._num_begun = False, False, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._held = ExitStack()  # the lock, the pipe

    def poll(self, *, is_idle: bool) -> Gate | None:
        """Begin, pause or go on, as the engine is idle or not; returns what is new of what documents may be."""
        if self._is_over:
            return None
        if not is_idle:
            self._idle_since_s = math.inf
            if self._process is not None:  # else a step has nothing to do here
                self._busy_since_s = min(self._busy_since_s, now_s := self._clock())
                self._say(False)
                if now_s - self._busy_since_s >= PAUSE_S:
                    self._stop()
            return None
        self._idle_since_s, self._busy_since_s = min(self._idle_since_s, self._clock()), math.inf
        if self._process is None:
            return self._begin() if self._clock() - self._idle_since_s >= IDLE_S else None
        if (status := self._process.poll()) is None:
            self._say(True)
            if self._clock() - self._began_s < LIMIT_S:
                return None
            self._stop()
            return self._ended(Gate(why=f"quality was not measured within {LIMIT_S / 3600:g} hours"))
        gate = self._read()
        if not gate.has_report:
            gate = Gate(why=f"quality could not be measured: {self._log} says why")
        logger.info("quality was measured: exit status %s, %s", status, gate.described())
        return self._ended(gate)

    def close(self) -> None:
        """End the measurement, which leaves nothing; the next start begins it anew."""
        self._is_over = True
        self._stop()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._held.close()

    def _begin(self) -> Gate | None:
        """Begin, unless another process of this machine measures: one at a time, whatever its model is."""
        self._idle_since_s = self._clock()  # if not now, then in a minute
        if self._num_begun == _MOST_BEGUN:
            return self._ended(Gate(why="quality was not measured: this server is never idle for long enough"))
        if self._weights_bytes > MOST_BYTES:
            return self._ended(Gate(why="a model of this size is measured by hand: mneme quality"))
        if available_bytes() < 2 * self._weights_bytes + _SPARE_BYTES:
            return self._ended(Gate(why="quality was not measured: there is no memory for it beside the engine"))
        try:
            lock = self._held.enter_context((self._folder / "quality.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (gate := self._read()).has_report:  # another replica's
                return self._ended(gate)
            with self._log.open("wb") as log:
                threads = str(max(1, (os.cpu_count() or 1) // _CORES))
                self._process = subprocess.Popen(
                    self._command, env={**os.environ, "OMP_NUM_THREADS": threads},
                    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log,
                )  # fmt: skip
        except BlockingIOError:
            self._held.close()
            return gate if (gate := self._read()).has_report else _MEASURING
        except OSError as error:
            return self._ended(Gate(why=f"quality could not be measured: {error}"))
        assert self._process.stdin is not None
        self._held.enter_context(suppress(OSError))  # of closing a pipe that nobody reads
        self._held.enter_context(self._process.stdin)
        os.set_blocking(self._process.stdin.fileno(), False)  # one that hangs reads nothing, and no step waits for it
        self._goes, self._began_s, self._num_begun = False, self._clock(), self._num_begun + 1
        logger.info("measuring what reusing documents does to answers, behind traffic: %s", " ".join(self._command))
        self._say(True)
        return _MEASURING

    def _ended(self, gate: Gate) -> Gate:
        self._is_over = True
        self._held.close()
        return gate

    def _say(self, goes: bool) -> None:
        """Let it step, or not; it does what the last byte says."""
        if self._process is not None and self._process.stdin is not None and goes != self._goes:
            self._goes = goes
            try:
                os.write(self._process.stdin.fileno(), b"1" if goes else b"0")
            except BlockingIOError:
                self._process.kill()  # it has read nothing for as long as a pipe is: it hangs
            except OSError:
                pass  # it has ended

    @property
    def _log(self) -> Path:
        return self._folder / "quality.log"


def measuring(model: str, dtype: str, weights: str, kv_dtype: str, folder: Path) -> list[str]:
    """Return the command that measures a model in the form that its replica has it in, on this machine's CPU."""
    options = ["--dtype", dtype, "--weights", weights, "--kv-dtype", kv_dtype, "--device", "cpu", "--out", str(folder)]
    return [
        *(sys.executable, "-m", "mneme", "quality", model, "--task", "auto"),
        *(*options, "--background", f"{BUDGET_S:g}"),
    ]
