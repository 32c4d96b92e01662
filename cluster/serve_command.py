"""`mneme serve`: a cluster in the foreground, from the configuration to Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mneme.cluster.config import ClusterConfig
from mneme.cluster.gpus import EnginePlacement
from mneme.cluster.lifecycle import LocalCluster, Progress
from mneme.errors import MnemeError

if TYPE_CHECKING:
    from mneme.cluster.ingress import BuildApi
    from mneme.cluster.replica import LoadEngine


def serve(config: ClusterConfig, *, load_engine: LoadEngine | None = None, build_api: BuildApi | None = None) -> int:
    """Run until a signal; returns the exit status. Tests pass an engine and an API of their own."""
    started_at = time.monotonic()
    cluster = LocalCluster(config)

    def application(placement: EnginePlacement) -> object:
        from mneme.cluster.app import build_application  # imports Ray Serve, whose knobs are set by now

        return build_application(config, placement, load_engine=load_engine, build_api=build_api)

    try:
        placement = _with_progress(lambda on_progress: cluster.start(application, on_progress))
        seconds = time.monotonic() - started_at
        print(
            f"ready: {cluster.url} model={config.model_name} replicas={placement.replicas} seconds={seconds:.1f}",
            flush=True,
        )
        cluster.wait()
    except MnemeError as error:
        print(f"mneme serve: {error}", file=sys.stderr)
        return 2
    finally:
        cluster.stop()
    return 0


def _with_progress(work: Callable[[Progress], EnginePlacement]) -> EnginePlacement:
    """Run `work` behind a progress line on stderr, where there is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("starting", total=1.0)
        return work(lambda stage, fraction: bars.update(task, description=stage, completed=fraction))
