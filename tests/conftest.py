"""Settings of every test process: one thread per process, no hub, and Ray's authentication stated, not inherited.

Without a GPU Triton kernels run in Triton's interpreter. It reads its variable when triton is first imported, which any
test may cause, so the choice is made here; what compiles kernels does so in a process of its own, without the variable.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # spinning threads of several processes starve each other
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
