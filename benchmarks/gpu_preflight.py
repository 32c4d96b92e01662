"""Says in one line what `make gpu` lacks, and exits with 2; or names the device."""

from __future__ import annotations

import importlib.util
import sys

NEEDED = ("torch", "triton", "numpy", "transformers", "pytest", "hypothesis")


def lacking() -> str | None:
    """What is missing first, if anything."""
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            return f"{sys.executable} has no {name}"
    import torch

    return None if torch.cuda.is_available() else f"{sys.executable} finds no CUDA device"


def main() -> int:
    reason = lacking()
    if reason is not None:
        print(f"make gpu: not run: {reason}", file=sys.stderr)
        return 2
    import torch
    import triton

    print(f"{torch.cuda.get_device_name()}: torch {torch.__version__}, triton {triton.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
