"""Times configurations of the Triton attention kernel on scenes whose KV does not fit the L2 cache.

Bound: decode steps by memory bandwidth, prefill by products. Where `config_of` is far from the best, change its rule.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from attention.arms import ours, own_buffers
from attention.scenes import Heads, Scene, prefix_scene
from attention.timing import Arm, interleaved

from mneme.kernels.triton.configs import WIDE_CANDIDATES, Config, Kind

_PAGE = 32


SCENES: dict[str, Kind] = {
    "decode b32 x 2048": "narrow", "decode b128 x 128": "narrow", "decode b1 x 16384": "narrow",
    "decode b32, 8192 shared, 128 own": "mixed", "prefill 2048 rows of 4096": "mixed",
}  # fmt: skip


def tuning_scenes(head_dim: int, cache_bytes: int, device: torch.device, shrink: int = 1) -> dict[str, Scene]:
    """Private decodes, a decode over a shared prefix, and a prefill with a past; all lengths divided by `shrink`."""
    heads = Heads(32, 8, head_dim)
    options: dict[str, Any] = {
        "heads": heads, "dtype": torch.bfloat16, "device": device, "cache_bytes": cache_bytes,
    }  # fmt: skip

    def scene(batch: int, shared: int, private: int, rows: int = 1) -> Scene:
        shared, private = (-(-length // shrink // _PAGE) * _PAGE for length in (shared, private))
        return prefix_scene(
            max(1, batch // shrink), shared, private, rows_per_sequence=max(1, rows // shrink), **options
        )

    return {
        "decode b32 x 2048": scene(32, 0, 2048),
        "decode b128 x 128": scene(128, 0, 128),
        "decode b1 x 16384": scene(1, 0, 16384),
        "decode b32, 8192 shared, 128 own": scene(32, 8192, 128),
        "prefill 2048 rows of 4096": scene(1, 0, 4096, rows=2048),
    }


def timed(arms: list[Arm], scene: Scene, budget_s: float) -> dict[str, float]:
    """Median milliseconds per layer of each arm that a GPU does not refuse, by its name."""
    runs = []
    for arm in arms:
        try:
            arm.output()
        except Exception as error:  # too much shared memory or too many registers; Triton's errors are no RuntimeError
            print(f"  {arm.name}: {error}")
        else:
            runs.append(arm)
    timings = interleaved(runs, scene.q.device, budget_s=budget_s)
    # Of one that was not captured that would be the time of its launches.
    return {arm.name: timings.ms(arm.name) for arm in runs if timings.launched[arm.name] != "eager"}


def wide_scenes(cache_bytes: int, device: torch.device, shrink: int = 1) -> dict[str, Scene]:
    """What has wide tiles, in pages of 64: prefills with a past, and decodes over a shared prefix."""
    heads = Heads(32, 8, 128) if shrink == 1 else Heads(8, 2, 64)
    options: dict[str, Any] = {
        "heads": heads, "dtype": torch.bfloat16, "device": device, "cache_bytes": cache_bytes, "page_size": 64,
    }  # fmt: skip
    sizes = {
        "prefill 2048 rows of 8192": (1, 0, 8192, 2048), "prefill 2048 rows of 32768": (1, 0, 32768, 2048),
        "decode b128, 8192 shared, 128 own": (128, 8192, 128, 1),
        "decode b32, 2048 shared, 128 own": (32, 2048, 128, 1),
    }  # fmt: skip
    return {
        name: prefix_scene(
            max(1, batch // shrink), *(-(-n // shrink // 64) * 64 for n in (shared, private)),
            rows_per_sequence=max(1, rows // shrink), **options,
        )
        for name, (batch, shared, private, rows) in sizes.items()
    }  # fmt: skip


def wide_arms(scene: Scene) -> list[Arm]:
    """Wide tiles in the launch of the others, by themselves in each way worth a try, and as served, where cuDNN may
    take a part."""
    from mneme.kernels.triton import backend as triton_backend

    arms = [ours(scene, "served")]
    for wide in (None, *WIDE_CANDIDATES):
        name = "one launch" if wide is None else f"wide {'x'.join(map(str, wide))}"
        plan, buffers = scene.plan(), own_buffers(scene.q.device)

        def call(layer: int, wide: Any = wide, plan: Any = plan, buffers: Any = buffers) -> torch.Tensor:
            with (
                buffers,
                patch.object(triton_backend, "wide_config_of", lambda **_: wide),
                patch.object(triton_backend, "_given_up", []),
            ):
                found = scene.attend(layer, plan, backend="triton")
                if triton_backend._given_up:
                    raise RuntimeError(triton_backend._given_up[0])
                return found

        arms.append(Arm(name, call, len(scene.layers)))
    return arms


def config_arms(scene: Scene, configs: list[Config]) -> list[Arm]:
    """Our attention under each configuration, in the place of the rule's."""
    from mneme.kernels.triton import backend as triton_backend

    arms = []
    for config in configs:  # each has a plan of its own: its work remembers the configuration
        plan, buffers = scene.plan(), own_buffers(scene.q.device)

        def call(layer: int, config: Config = config, plan: Any = plan, buffers: Any = buffers) -> torch.Tensor:
            with buffers, patch.object(triton_backend, "config_of", lambda **_: config):
                return scene.attend(layer, plan, backend="triton")

        arms.append(Arm(str(tuple(config)), call, len(scene.layers)))
    return arms
