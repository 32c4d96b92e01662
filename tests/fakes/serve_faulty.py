"""`mneme serve` with real engines that break when a file named after their process id says how.

hang        the engine's thread ends no step any more; it counts as hung after 15 s, and not after 60
no reports  nothing is reported to routers
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from mneme.cluster.cli.serve import serve
from mneme.cluster.config import load_config
from mneme.replicas.engine.loop import EngineLoop

_POLL_S = 0.1


def fault_file(directory: str | Path, pid: int) -> Path:
    return Path(directory) / f"fault-{pid}"


def load_faulty_engine(*args: Any, **options: Any) -> EngineLoop:
    from mneme.replicas.engine import loop as loop_module
    from mneme.replicas.engine.build import build_engine_loop

    loop_module.HUNG_S = 15.0
    loop = build_engine_loop(*args, **options)
    threading.Thread(target=_watch, args=(loop,), daemon=True).start()
    return loop


def _watch(loop: EngineLoop) -> None:
    file = fault_file(os.environ["MNEME_FAULTS"], os.getpid())
    while not file.exists():
        time.sleep(_POLL_S)
    if file.read_text() == "hang":
        loop.between_steps(lambda _: threading.Event().wait())
    loop._report = lambda: None  # type: ignore[method-assign]


if __name__ == "__main__":
    os.environ.setdefault("MNEME_FAULTS", tempfile.gettempdir())
    sys.exit(serve(load_config(None, sys.argv[1:]), build_engine=load_faulty_engine))
