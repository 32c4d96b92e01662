"""The one place that chooses the tier under a device pool."""

from __future__ import annotations

from mneme.cachetier.pages.host_memory import DevicePool, HostMemory
from mneme.cachetier.pages.host_memory_cuda import PinnedHostMemory
from mneme.cachetier.pages.streams import CudaStreams
from mneme.cachetier.pages.tier import KvTier, NoTier, SpanRecorder


def make_tier(pool: DevicePool, num_pages: int, spans: SpanRecorder | None = None) -> KvTier:
    """A tier of `num_pages` host pages; 0: none. Raises `ConfigError` if there is no such memory."""
    if num_pages == 0:
        return NoTier()
    device = pool.k_pages.device
    if device.type == "cuda":
        return PinnedHostMemory(pool, num_pages, CudaStreams(device, is_timed=spans is not None), spans=spans)
    return HostMemory(pool, num_pages, spans=spans)
