"""What machine a figure was taken on."""

import platform
from pathlib import Path


def cpu_name() -> str:
    """As Linux tells it; elsewhere the architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
