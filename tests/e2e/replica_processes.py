"""The processes of a server's replicas."""

from __future__ import annotations

import os

from tests.e2e.server_process import ServerProcess


def cpu_seconds(process: ServerProcess) -> dict[int, float]:
    """CPU time of each engine replica so far, by pid."""
    result = {}
    for pid in replica_pids(process, "ray::ServeReplica:mneme:engine"):
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            user, system = stat.read().rpartition(")")[2].split()[11:13]
        result[pid] = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return result


def replica_pids(process: ServerProcess, title: str) -> list[int]:
    return [pid for pid, command in process.processes().items() if command.startswith(title)]
