"""Settings of every test process: one thread per process, no hub, and Ray's authentication stated, not inherited."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # spinning threads of several processes starve each other
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
