"""Decides how many engines run, on which device, and what part of a GPU each has.

Ray gives each replica its GPU, by `CUDA_VISIBLE_DEVICES`; what is decided here is only how many it is asked for.
"""

from __future__ import annotations

import os
from itertools import takewhile
from typing import NamedTuple

from mneme.cluster.config import ClusterConfig
from mneme.errors import ConfigError

_CPU_REPLICAS = 2


class EnginePlacement(NamedTuple):
    """Tells Serve and the replicas how many engines run, and on what."""

    replicas: int  # at first, where they are autoscaled
    device: str  # "cpu" or "cuda": a replica that does not find its GPU fails, and never serves from the CPU instead
    gpus_per_replica: float  # 0 on the CPU; under 1: engines share a GPU, and its memory

    def __str__(self) -> str:
        where = f"with {self.gpus_per_replica:g} GPU each" if self.gpus_per_replica else "on the CPU"
        return f"{self.replicas} {'replica' if self.replicas == 1 else 'replicas'} {where}"


def place_engines(config: ClusterConfig, num_gpus: int, *, may_grow: bool = False) -> EnginePlacement:
    """Decide what the configuration leaves open: a replica for each GPU where there are some, else two on the CPU.

    num_gpus  GPUs that Ray has now
    may_grow  more nodes, with GPUs, may join: more replicas than fit now are no error

    Raises `ConfigError`.
    """
    device, gpus = config.engine.device, config.gpus_per_replica
    if device.startswith("cuda:"):
        raise ConfigError(f"engine.device: Ray chooses each replica's GPU; say cuda (got {device!r})")
    if device == "cpu" or (device == "auto" and not (num_gpus if gpus is None else gpus)):
        if gpus:
            raise ConfigError(f"gpus_per_replica: engine.device is cpu, which needs none (got {gpus:g})")
        return EnginePlacement(_first(config) or _CPU_REPLICAS, "cpu", 0.0)
    if gpus == 0:
        raise ConfigError("gpus_per_replica: an engine on a GPU needs one, or a share of one (got 0)")
    gpus = 1.0 if gpus is None else gpus
    room = num_gpus * int(1 / gpus)
    replicas = _first(config) or room
    if not replicas:
        raise ConfigError("engine.device: there is no GPU; `replicas` says how many will be there, cpu serves without")
    most = replicas if config.autoscale is None else config.autoscale.max
    if most > room and not may_grow:
        raise ConfigError(
            f"replicas: {most} with {gpus:g} GPU each do not fit on {num_gpus}; "
            "a smaller gpus_per_replica lets them share one, and its memory"
        )
    return EnginePlacement(replicas, "cuda", gpus)


def place_models(config: ClusterConfig, num_gpus: int, *, may_grow: bool = False) -> tuple[EnginePlacement, ...]:
    """Decide as `place_engines` does for each model; those that do not say how many share the GPUs others leave.

    Raises `ConfigError`.
    """
    each = config.each_model()
    if len(each) == 1 or not num_gpus:
        return tuple(place_engines(one, num_gpus, may_grow=may_grow) for one in each)
    said = {one.model_name: place_engines(one, num_gpus, may_grow=may_grow) for one in each if _first(one)}
    used = sum(placement.replicas * placement.gpus_per_replica for placement in said.values())
    others = [one for one in each if one.model_name not in said and place_engines(one, num_gpus).gpus_per_replica]
    share = max(0, int(num_gpus - used)) // max(1, len(others))
    if (others and not share) or (used > num_gpus and not may_grow):
        raise ConfigError(
            f"models: {len(each)} do not fit on {num_gpus} GPUs; "
            "replicas says how many engines each has, gpus_per_replica lets them share a GPU"
        )
    return tuple(said.get(one.model_name) or place_engines(one, share, may_grow=may_grow) for one in each)


def _first(config: ClusterConfig) -> int | None:
    """Return how many engines run at first, if the configuration says so."""
    return config.replicas if config.autoscale is None else max(config.autoscale.min, 1)


def count_gpus() -> int:
    """GPUs that processes started from here may use; 0 without a driver.

    As CUDA reads `CUDA_VISIBLE_DEVICES`: it stops at the first entry that is no device. Each part of a GPU that was
    divided in hardware (`MIG-...`) is one.
    """
    count = _count_whole_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not count:
        return count
    entries = [each.strip() for each in visible.split(",")]
    if entries[0].startswith("MIG-"):
        return len(list(takewhile(lambda each: each.startswith("MIG-"), entries)))
    devices = takewhile(lambda each: each.startswith("GPU-") or (each.isdecimal() and int(each) < count), entries)
    return min(count, len(list(devices)))


def count_machine_gpus() -> int:
    """GPUs of this machine or pod, whoever uses them, parts of one as in `count_gpus`; 0 without a driver."""
    return max(_count_whole_gpus(), count_gpus())


def _count_whole_gpus() -> int:
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0
