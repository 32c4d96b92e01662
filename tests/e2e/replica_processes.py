"""The processes of a server's replicas."""

from __future__ import annotations

import os
import signal

from tests.e2e.server_process import ServerProcess

ENGINES = "ray::ServeReplica:mneme:engine"
INGRESSES = "ray::ServeReplica:mneme:ingress"


def replica_pids(process: ServerProcess, title: str = ENGINES) -> list[int]:
    return [pid for pid, command in process.processes().items() if command.startswith(title)]


def cpu_seconds(process: ServerProcess) -> dict[int, float]:
    """CPU time of each engine replica so far, by pid."""
    result = {}
    for pid in replica_pids(process):
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            user, system = stat.read().rpartition(")")[2].split()[11:13]
        result[pid] = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return result


def busiest(process: ServerProcess, before: dict[int, float]) -> int:
    """The replica that has taken most CPU time since `before`: of what was asked of one, that one."""
    busy = {pid: used - before.get(pid, 0.0) for pid, used in cpu_seconds(process).items()}
    return max(busy, key=lambda pid: busy[pid])


def kill_busiest(process: ServerProcess, before: dict[int, float]) -> None:
    os.kill(busiest(process, before), signal.SIGKILL)
