"""Watches the GPU of a replica through NVML: figures for metrics, and whether it can be trusted still."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

# Xids that a program causes, not the device: graphics and memory faults, channels that were ended.
# https://docs.nvidia.com/deploy/xid-errors
_XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})


class GpuHealth:
    """One GPU. Not thread-safe."""

    def __init__(self, handle: Any, name: str) -> None:
        import pynvml

        self._nvml, self._handle, self.name = pynvml, handle, name
        self._xids: Counter[int] = Counter()
        self._events = _or_none(self._listen)
        self._num_ecc_before = self._num_ecc() or 0  # what was before is not this replica's
        self._problem: str | None = None

    def read(self) -> dict[str, Any]:
        """Return figures, without those that this GPU does not have, and under "problem" what is wrong with it.

        What was wrong once stays wrong: a replica on such a device is replaced.
        """
        nvml, handle = self._nvml, self._handle
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:  # it fell off the bus, or waits for a reset
            self._problem = self._problem or f"NVML: {error}"
            return {"gpu": self.name, "problem": self._problem}
        self._read_xids()
        num_ecc = self._num_ecc()
        of_device = [xid for xid in self._xids if xid not in _XIDS_OF_PROGRAMS]
        if of_device:
            self._problem = self._problem or f"Xid {of_device[0]}"
        elif num_ecc is not None and num_ecc > self._num_ecc_before:
            self._problem = self._problem or f"{num_ecc - self._num_ecc_before} uncorrected ECC errors"
        figures = {
            "gpu": self.name,
            "problem": self._problem,
            "memory": {"used": memory.used, "total": memory.total},
            "utilization": _or_none(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            "ecc_uncorrected": num_ecc,
            "xids": {"device": 0, "program": 0},
        }
        for xid, count in self._xids.items():
            figures["xids"]["program" if xid in _XIDS_OF_PROGRAMS else "device"] += count
        return {key: value for key, value in figures.items() if value is not None or key == "problem"}

    def _listen(self) -> Any:
        events = self._nvml.nvmlEventSetCreate()
        self._nvml.nvmlDeviceRegisterEvents(self._handle, self._nvml.nvmlEventTypeXidCriticalError, events)
        return events

    def _read_xids(self) -> None:
        while self._events is not None:
            event = _or_none(lambda: self._nvml.nvmlEventSetWait_v2(self._events, 0))
            if event is None:
                return
            logger.error("gpu=%s xid=%d", self.name, event.eventData)
            self._xids[int(event.eventData)] += 1

    def _num_ecc(self) -> int | None:
        nvml = self._nvml
        kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        count: int | None = _or_none(lambda: nvml.nvmlDeviceGetTotalEccErrors(self._handle, *kind))
        return count


def own_gpu(index: int = 0) -> GpuHealth | None:
    """Open a GPU that this process may use, by torch's index; None, and a line in the log, if NVML does not know it."""
    import pynvml

    try:
        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        name = str(index) if visible is None else visible.split(",")[index].strip()
        if name.isdecimal():
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(name))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        return GpuHealth(handle, str(pynvml.nvmlDeviceGetUUID(handle)))
    except pynvml.NVMLError as error:
        logger.warning("no figures of the GPU, and no watch over it: NVML: %s", error)
        return None


def _or_none(ask: Callable[[], Any]) -> Any:
    """Return None for what a device or driver does not have."""
    import pynvml

    try:
        return ask()
    except pynvml.NVMLError:
        return None
