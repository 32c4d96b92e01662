"""Streams and events of a device, as much as a tier needs; tests play a device behind the same names.

Work of one stream runs in order; work of different streams in any order that the events allow. Nothing here blocks the
caller but `Event.wait` and `finish`.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mneme.cachetier.host_pages.tier import SpanRecorder
from mneme.errors import ConfigError
from mneme.kernels.page_table import IntArray
from mneme.kernels.upload import upload

PIN_BYTES = os.sysconf("SC_PAGE_SIZE")  # memory is pinned by whole pages of the system
_POPULATE_WRITE, _PREFERRED = 23, 1  # of madvise and mbind
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_MBIND = {"x86_64": 237, "aarch64": 235}  # the system call's number; no library that is everywhere has it


class Event(Protocol):
    """A point in a stream."""

    def is_done(self) -> bool:
        """Return whether the stream has come past it."""

    def wait(self) -> None:
        """Return when the stream has come past it."""

    def seconds_since(self, start: Event) -> float:
        """Between two events that are done; only of timed streams."""


class Stream(Protocol):
    """A queue of work."""

    def run(self, work: Callable[[], None]) -> None:
        """Append work, which launches copies and kernels and waits for nothing."""

    def wait(self, event: Event) -> None:
        """Let what is appended from now on come after the event."""

    def record(self) -> Event:
        """Return the point behind all that was appended so far."""

    def upload(self, ids: IntArray) -> Tensor:
        """int64 on the device, for work of this stream alone."""


class Streams(Protocol):
    """The streams of one device."""

    def new(self) -> Stream: ...

    def current(self) -> Stream:
        """Return where the engine computes."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Device memory."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """uint8 host memory that the device copies from and to by itself."""

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Let the device copy from and to host memory by itself; the function that is returned ends that.

        Its content stays as it is, and may be copied and written meanwhile.
        """

    def finish(self) -> None:
        """Return when all streams have come to their ends."""


class CudaEvent:
    """An event of a CUDA stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, start: Event) -> float:
        assert isinstance(start, CudaEvent)
        return float(start.event.elapsed_time(self.event)) / 1000


class CudaStream:
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream, is_timed: bool) -> None:
        self._stream = stream
        self._is_timed = is_timed

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)

    def record(self) -> CudaEvent:
        # Who waits for it sleeps: the engine's thread has better use for the processor.
        event = torch.cuda.Event(enable_timing=self._is_timed, blocking=True)  # type: ignore[no-untyped-call]
        self._stream.record_event(event)
        return CudaEvent(event)

    def upload(self, ids: IntArray) -> Tensor:
        with torch.cuda.stream(self._stream):
            return upload(ids, self._stream.device)


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device, *, is_timed: bool = False) -> None:
        self._device = device
        self._is_timed = is_timed

    def new(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self._device), self._is_timed)  # type: ignore[no-untyped-call]

    def current(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self._device), self._is_timed)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Registered as it is: torch's own pinned memory takes the next power of two of bytes."""
        allocate(memory, near_node(torch.cuda.get_device_properties(self._device)))
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            status = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if status:
            raise ConfigError(
                f"engine.host_cache_bytes: CUDA error {status} while {memory.nbytes} bytes were pinned; "
                "give less, or 0 for no host tier"
            )
        return partial(self._unpin, memory.data_ptr())

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def _unpin(self, address: int) -> None:
        self.finish()  # a copy may be under way
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def allocate(memory: Tensor, node: int | None) -> None:
    """Take memory from the system, of a NUMA node if it has some, before it is pinned, which may hold up other calls.

    Where the system does not do that, pinning takes it, from wherever it is.
    """
    libc, start = ctypes.CDLL(None), memory.data_ptr()
    if node is not None and (number := _MBIND.get(platform.machine())) is not None:
        nodes = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
        nodes[node // _WORD_BITS] = 1 << node % _WORD_BITS
        arguments = (start, memory.nbytes, _PREFERRED, ctypes.addressof(nodes), len(nodes) * _WORD_BITS + 1, 0)
        libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments))
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(memory.nbytes), _POPULATE_WRITE)


def near_node(properties: Any, sys: Path = Path("/sys")) -> int | None:
    """Return the NUMA node that a GPU is at; None where there is one node alone, or nobody knows.

    properties  what torch says of the device
    """
    try:
        if not set("-,") & set((sys / "devices/system/node/online").read_text()):
            return None
        place = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        node = int((sys / "bus/pci/devices/{:04x}:{:02x}:{:02x}.0/numa_node".format(*place)).read_text())
    except (OSError, ValueError, AttributeError):  # an older torch does not say where it is
        return None
    return node if node >= 0 else None


_REBASE_S = 1.0  # times between events come as float32


class _Pending(NamedTuple):
    """A span whose end the device has not reached when it was added."""

    name: str
    start: Event
    end: Event
    track: str
    args: dict[str, int]


class EventSpans:
    """Adds spans to a recorder once the device is past their ends."""

    def __init__(self, recorder: SpanRecorder, streams: Streams) -> None:
        """Waits for the device, to know one event's time on the recorder's clock."""
        self._recorder = recorder
        self._pending: deque[_Pending] = deque()
        self._streams = streams
        self._base = streams.current().record()
        streams.finish()
        self._base_s = recorder.clock()
        recorder.before_write(self.finish)

    def add(self, name: str, start: Event, end: Event, track: str, **args: int) -> None:
        """A span between two timed events."""
        self._pending.append(_Pending(name, start, end, track, args))

    def flush(self) -> None:
        """Pass on what the device is past."""
        while self._pending and self._pending[0].end.is_done():
            span = self._pending.popleft()
            start_s = self._base_s + span.start.seconds_since(self._base)
            end_s = self._base_s + span.end.seconds_since(self._base)
            self._recorder.span(span.name, start_s, end_s, span.track, **span.args)
            if end_s - self._base_s > _REBASE_S:
                self._base, self._base_s = span.end, end_s

    def finish(self) -> None:
        """Pass on everything; waits for the device."""
        if self._pending:
            self._streams.finish()
            self.flush()
