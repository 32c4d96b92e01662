"""What a GPU target lacks, in one line that says what to do, before anything is begun."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from typing import Any

from mneme.kernels.triton.configs import MIN_CAPABILITY

# What the targets import; Ray, HTTP and grammars are not among it.
NEEDED = (
    *("torch", "numpy", "transformers", "tokenizers", "safetensors", "pyarrow", "xxhash", "pynvml"),
    *("pytest", "hypothesis"),
)
_ANSWER_S = 60.0  # a driver that takes longer takes a target's time as well
# Llama-3-8B in bfloat16, the KV of 256 sequences, and room for graphs.
MIN_BYTES = 48 << 30


def reason_against(*, needs_device: bool = True) -> str | None:
    """What is missing first, if anything. Looked for in a process of its own: the targets fork, and a process that has
    touched CUDA may not be forked from."""
    for name in (*NEEDED, *(("triton",) if needs_device else ())):
        if importlib.util.find_spec(name) is None:
            return f"{sys.executable} has no {name}: choose another PYTHON, or install it there"
    if not needs_device:
        return None
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_reason, args=(theirs,))
    process.start()
    theirs.close()
    try:
        late = f"{sys.executable} finds no CUDA device: the driver has not answered in {_ANSWER_S:.0f} s"
        reason: str | None = ours.recv() if ours.poll(_ANSWER_S) else late
    except EOFError:
        reason = "looking for a CUDA device ended the process: see what it printed above"
    process.kill()  # it has said what it knows
    process.join(_ANSWER_S)
    return reason


def _send_reason(pipe: Any) -> None:
    pipe.send(reason_against_device())


def reason_against_device() -> str | None:
    """Say what is against the device that torch finds."""
    import torch

    if torch.version.cuda is None:
        return f"{sys.executable} finds no CUDA device: its torch, {torch.__version__}, is no CUDA build, install one"
    try:
        torch.cuda.init()
    except Exception as error:  # no driver, an old one, no device, one that is lost: torch says which
        return f"{sys.executable} finds no CUDA device: {_in_one_line(error)}{_driver_advice(str(error))}"
    device = torch.cuda.get_device_properties(0)
    return reason_against_properties(device.name, (device.major, device.minor), device.total_memory)


def reason_against_properties(name: str, capability: tuple[int, int], num_bytes: int) -> str | None:
    if capability < MIN_CAPABILITY:
        found, least = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
        return f"{name} has compute capability {found}: the kernels are for {least} and later (A100, H100, H200)"
    if num_bytes < MIN_BYTES:
        return (
            f"{name} has {num_bytes / 2**30:.0f} GiB: an 8B model and its KV need {MIN_BYTES >> 30}, use a larger one"
        )
    return None


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def _driver_advice(message: str) -> str:
    import torch

    if "too old" not in message and "insufficient" not in message:
        return ""
    return f"; update the driver, or use a torch for an older CUDA than {torch.version.cuda}"
