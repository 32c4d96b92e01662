"""A tier as a dictionary of pages: what any order of calls must come to."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from mneme.cachetier.host_pages.tier import KvTier
from tests.cachetier.pools import NUM_LAYERS, Pool, random_page


class Operation(NamedTuple):
    """One call of a policy. The pages of a save or load are pairs; a write uses the device pages only."""

    kind: str  # "save", "load", "load later", "write"
    pairs: list[tuple[int, int]]  # (device page, host page)
    drops: bool  # loads that nobody has waited for yet are not read any more, as after an abort


def operations(num_device: int, num_host: int) -> st.SearchStrategy[Operation]:
    pairs = st.integers(1, min(num_device, num_host)).flatmap(
        lambda n: st.tuples(
            st.permutations(range(num_device)).map(lambda p: p[:n]),
            st.permutations(range(num_host)).map(lambda p: p[:n]),
        ).map(lambda both: list(zip(*both, strict=True)))
    )
    return st.builds(Operation, st.sampled_from(["save", "load", "load later", "write"]), pairs, st.booleans())


def run_now(work: Callable[[], None]) -> None:
    work()


def run_operations(
    tier: KvTier,
    pool: Pool,
    steps: list[Operation],
    compute: Callable[[Callable[[], None]], None] = run_now,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Run calls as a policy does, reading and writing pages as an engine does, and compare all that is read.

    compute  runs the engine's reads and writes, now or when the engine's stream comes to it
    between  is called after each operation
    """
    device = {page: pool.page(page) for page in range(pool.k_pages.shape[2])}
    host: dict[int, torch.Tensor] = {}
    pending: list[tuple[object, dict[int, torch.Tensor]]] = []

    def compare(layer: int, expected: dict[int, torch.Tensor]) -> None:
        for page, content in expected.items():
            for index, pages in enumerate((pool.k_pages, pool.v_pages)):
                assert torch.equal(pages[layer, :, page], content[index, layer]), (layer, page)

    def read(load: object, expected: dict[int, torch.Tensor]) -> None:
        for layer in range(NUM_LAYERS):
            load.wait_layer(layer)  # type: ignore[attr-defined]
            compute(lambda layer=layer: compare(layer, expected))  # type: ignore[misc]

    def overwrite(pages: list[int], seed: int) -> None:
        for offset, page in enumerate(pages):
            device[page] = random_page(100 * seed + offset, pool)
            compute(lambda page=page, content=device[page]: pool.write(page, content))  # type: ignore[misc]

    for seed, step in enumerate(steps):
        pairs = step.pairs if step.kind in ("save", "write") else [pair for pair in step.pairs if pair[1] in host]
        devices, hosts = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if step.kind != "save":  # pages of pending loads may change
            for load, expected in [] if step.drops else pending:
                read(load, expected)
            pending.clear()
        if step.kind == "save":
            tier.save(np.array(devices), np.array(hosts))
            host.update({h: device[d] for d, h in pairs})
        elif step.kind == "write":
            tier.before_reuse(np.array(devices))
            overwrite(devices, seed)
        else:
            load = tier.load(np.array(hosts, np.int64), np.array(devices, np.int64))
            device.update({d: host[h] for d, h in pairs})
            pending.append((load, {d: device[d] for d in devices}))
            if step.kind == "load":
                read(*pending.pop())
        between()
    for load, expected in pending:
        read(load, expected)
    tier.before_reuse(np.array(list(device)))
    for layer in range(NUM_LAYERS):
        compute(lambda layer=layer: compare(layer, device))  # type: ignore[misc]
