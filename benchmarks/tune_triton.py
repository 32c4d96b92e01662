"""Time every candidate configuration of the Triton attention kernel on this GPU: `python benchmarks/tune_triton.py`.

For each head dimension and each kind of step it builds one scene whose KV does not fit the L2 cache, times all
candidates in turns (medians of rounds, CUDA graphs; see `attention/timing.py`), and compares them with what
`triton_configs.config_of` chooses. Bound: decode steps by memory bandwidth, prefill by products.

The last line is JSON: per scene the candidates with their milliseconds, best first, and the rule's choice. Where the
rule is far from the best, change the rule.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parent))

from attention.arms import own_buffers
from attention.scenes import Heads, Scene, prefix_scene
from attention.timing import Arm, interleaved

from mneme.kernels.triton.configs import Config, candidates, config_of

_HEAD_DIMS = (64, 128, 256)
_BUDGET_S = 20.0
_PAGE = 32


def scenes(head_dim: int, cache_bytes: int, device: torch.device, shrink: int = 1) -> dict[str, Scene]:
    """A private decode, a decode over a shared prefix, and a prefill with a past; all lengths divided by `shrink`."""
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
        "decode b32, 8192 shared, 128 own": scene(32, 8192, 128),
        "decode b1 x 16384": scene(1, 0, 16384),
        "prefill 2048 rows of 4096": scene(1, 0, 4096, rows=2048),
    }


def timed(scene: Scene, configs: list[Config], budget_s: float) -> dict[Config, float]:
    """Median milliseconds per layer of each configuration that runs; one that the GPU refuses is left out."""
    arms = []
    with ExitStack() as stack:
        for config in configs:
            arm = _arm(scene, config, stack)
            try:
                arm.output()
            except (
                Exception
            ) as error:  # too much shared memory or too many registers; Triton's errors are no RuntimeError
                print(f"  {config}: {error}")
            else:
                arms.append(arm)
        timings = interleaved(arms, scene.q.device, budget_s=budget_s)
    names = [arm.name for arm in arms if timings.launched[arm.name] != "eager"]  # that would be the time of launches
    return {Config(*json.loads(name)): timings.ms(name) for name in names}


def _arm(scene: Scene, config: Config, stack: ExitStack) -> Arm:
    from mneme.kernels.triton import backend as triton_backend

    plan, buffers = scene.plan(), own_buffers(scene.q.device)  # a plan of its own: its work remembers the configuration

    def call(layer: int) -> torch.Tensor:
        with buffers, patch.object(triton_backend, "config_of", lambda **_: config):
            return scene.attend(layer, plan, backend="triton")

    return Arm(json.dumps(config), call, len(scene.layers))


def main() -> None:
    """Print a table for each scene, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, choices=_HEAD_DIMS, action="append")
    parser.add_argument("--budget-s", type=float, default=_BUDGET_S, help="seconds of timing for each scene")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    device = torch.cuda.get_device_properties(0)
    architecture = 10 * device.major + device.minor
    found: dict[str, Any] = {"device": device.name, "architecture": architecture, "scenes": []}
    for head_dim in arguments.head_dim or _HEAD_DIMS:
        sizes = {"head_dim": head_dim, "element_bytes": 2, "num_groups": 4, "architecture": architecture}
        chosen = {phase: config_of(**sizes, phase=phase) for phase in ("decode", "prefill")}
        for name, scene in scenes(head_dim, device.L2_cache_size, torch.device("cuda")).items():
            times = timed(scene, list(candidates(**sizes)), arguments.budget_s)
            ranked = sorted(times.items(), key=lambda item: item[1])
            rule = chosen["prefill" if name.startswith("prefill") else "decode"]
            print(f"head_dim {head_dim}, {name}: rule {tuple(rule)} {times.get(rule, float('nan')):.4f} ms")
            for config, milliseconds in ranked[:5]:
                print(f"  {tuple(config)} {milliseconds:.4f} ms")
            found["scenes"].append({"head_dim": head_dim, "scene": name, "rule": rule, "ranked_ms": ranked})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
