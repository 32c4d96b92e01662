"""Compiles the kernels that some launches need, many at a time, before any of them is launched.

One variant of the attention kernel takes a compiler 6 to 8 s, and a process compiles one after the other. So launches
are first recorded (`recorded`: none of them runs), then compiled by processes of their own, which write Triton's disk
cache; launches find them there. The key of that cache is made of sources, signature, constants, options and target: all
of these are recorded, so the processes need no driver, and put no context on a GPU.

What a launch is specialized for beside its constants (pointers and integers that are multiples of 16, integers that
are 1) is recorded with it; a launch that differs there is compiled when it is met.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from ast import literal_eval
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import triton
from mneme.kernels.triton.modules import CompileError, does_not_run, in_one_line, kernels_of, triton_trouble
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

_WORKER = "from mneme.kernels.triton.precompile import compile_what_comes; compile_what_comes({limit_s})"
_MAX_PROCESSES = 16
_LIMIT_S = 300  # for one variant, which takes less than ten
_recording = threading.Lock()


class Variant(NamedTuple):
    """Holds what a launch has compiled."""

    module: str
    kernel: str
    signature: dict[str, str]  # argument -> type
    constants: dict[Any, Any]  # path of an argument -> value
    attributes: dict[Any, Any]  # path of an argument -> what is known of it
    options: dict[str, Any]
    target: tuple[str, Any, int]  # backend, architecture, threads of a warp

    def __str__(self) -> str:
        names = list(self.signature)
        values = [f"{names[path[0]]}={value}" for path, value in self.constants.items() if names[path[0]].isupper()]
        values += [f"{name}={self.options.get(name)}" for name in ("num_warps", "num_stages")]
        return f"{self.kernel}({', '.join(values)}) for {self.target[0]}:{self.target[1]}"


@contextmanager
def recorded() -> Iterator[list[Variant]]:
    """Launches of this thread do not run; the list gets those that would have had to be compiled, each once.

    What they would have computed is undefined: nothing may be looked up by it. Other threads launch as always.
    """
    variants: dict[str, Variant] = {}
    found: list[Variant] = []
    thread, run = threading.get_ident(), JITFunction.run
    target = triton.runtime.driver.active.get_current_target()
    knobs: Any = triton.knobs.runtime

    def run_or_not(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=warmup or threading.get_ident() == thread, **options)

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if threading.get_ident() != thread:
            return False
        variant = Variant(
            module=fn.jit_function.module,
            kernel=fn.jit_function.fn.__qualname__,
            signature=compile["signature"],
            constants=compile["constants"],
            attributes=compile["configs"][0],
            options=json.loads(compile["specialization_data"])["options"],
            target=(target.backend, target.arch, target.warp_size),
        )
        if variants.setdefault(repr(variant[:]), variant) is variant:
            found.append(variant)
        return True  # it is not compiled now

    with _recording:
        hook, knobs.jit_cache_hook, JITFunction.run = knobs.jit_cache_hook, note, run_or_not
        try:
            yield found
        finally:
            knobs.jit_cache_hook, JITFunction.run = hook, run


def is_compiled(variant: Variant) -> bool:
    """Tell whether Triton's disk cache has it."""
    try:
        _compile(variant, _Cached)
    except _NotCompiled:
        return False
    return True


def compile_all(
    variants: Iterable[Variant],
    on_progress: Callable[[float], None],
    num_processes: int | None = None,
    limit_s: int = _LIMIT_S,
) -> None:
    """Compile what Triton's disk cache does not have yet; `on_progress` gets the share done.

    num_processes  at most so many at a time, of about 400 MB each; by default one for each CPU, up to 16
    limit_s        for each variant: a compiler that takes longer is stopped

    Raises CompileError if one of them cannot be compiled, after all others were tried.
    """
    missing = [variant for variant in variants if not is_compiled(variant)]
    if not missing:
        on_progress(1.0)
        return
    tasks = deque(sorted(missing, key=lambda variant: -len(variant.constants)))  # attention first: it takes longest
    done: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    num_processes = min(len(missing), num_processes or min(len(os.sched_getaffinity(0)), _MAX_PROCESSES))
    errors = []
    with ThreadPoolExecutor(num_processes) as threads:
        for _ in range(num_processes):
            threads.submit(_feed, tasks, done, limit_s)
        try:
            for count in range(1, len(missing) + 1):
                if (error := done.get()) is not None:
                    errors.append(error)
                on_progress(count / len(missing))
        finally:  # nobody waits for the rest if this is interrupted
            tasks.clear()
    if errors:
        others = f"; {len(errors) - 1} more failed" if len(errors) > 1 else ""
        raise CompileError(f"{errors[0]}{others}")


def compile_what_comes(limit_s: int) -> None:
    """Run in a process of the pool: variants come in, a line each; a line with an error, or none, goes out for each.

    A variant that takes longer than `limit_s` ends the process: nothing else stops a compiler that hangs.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what compilers print is no answer
    for line in sys.stdin:
        variant, error = Variant(*literal_eval(line)), ""
        signal.alarm(limit_s)
        try:
            _compile(variant, ASTSource)
        except Exception as failure:  # the edge of the process
            name = str(variant)
            error = triton_trouble(failure, name) or does_not_run(f"{name} ({in_one_line(failure)})")
        signal.alarm(0)
        print(error, file=answers, flush=True)


class _NotCompiled(Exception):
    """Triton was asked for a kernel that it has not compiled."""


class _Cached(ASTSource):  # type: ignore[misc]
    """A source that is not to be compiled: only what Triton has of it is wanted."""

    def make_ir(self, *_: Any) -> Any:
        raise _NotCompiled


def _compile(variant: Variant, source: type) -> None:
    function = getattr(kernels_of(variant.module), variant.kernel)
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in variant.options.items()}
    triton.compile(
        source(function, variant.signature, variant.constants, variant.attributes),
        target=GPUTarget(*variant.target),
        options=options,
    )


def _feed(tasks: deque[Variant], done: queue.SimpleQueue[str | None], limit_s: int) -> None:
    """Gives tasks to a process, one after the other; a process that dies costs its task."""
    process: subprocess.Popen[str] | None = None
    while tasks:
        try:
            variant = tasks.popleft()
        except IndexError:  # another thread was faster
            break
        try:
            process = process or _start_process(limit_s)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{variant[:]!r}\n")
            process.stdin.flush()
            answer, failure = process.stdout.readline(), ""
        except OSError as error:  # it could not start, or ended before it read
            answer, failure = "", f", {error}"
        if not answer.endswith("\n"):
            code = None if process is None else process.wait()
            ended = f"took more than {limit_s} s" if code == -signal.SIGALRM else f"its process ended: {code}{failure}"
            answer, process = does_not_run(f"{variant} ({ended})"), None
        done.put(answer.strip() or None)
    if process is not None:
        process.communicate()


def _start_process(limit_s: int) -> subprocess.Popen[str]:
    """Start a process with this one's import path, and without a GPU."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-c", _WORKER.format(limit_s=limit_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
