"""What this machine, or the container that this process is in, has left."""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> int:
    """Count bytes that the machine, or a container under its limit, can still give, those of the page cache too.

    cgroup   where control groups are mounted, of version 2 or 1
    meminfo  what Linux says of its memory; where it says nothing, only memory that is free counts
    """
    try:
        free = int(meminfo.read_text().split("MemAvailable:")[1].split()[0]) << 10
    except (OSError, IndexError, ValueError):
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    files = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
    for limit, usage in files:
        try:
            left = int((cgroup / limit).read_text()) - int((cgroup / usage).read_text())
            stat = (cgroup / limit).with_name("memory.stat").read_text().split()
        except (OSError, ValueError):  # not mounted, or "max"
            continue
        cached = [int(stat[i + 1]) for i, word in enumerate(stat) if word in ("inactive_file", "total_inactive_file")]
        free = min(free, max(0, left + max(cached, default=0)))
    return free
