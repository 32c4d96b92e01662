"""No counter falls, whatever becomes of its replica: Prometheus would take a fall for a restart, and see traffic."""

from __future__ import annotations

import asyncio

import pytest

from mneme.cluster.metrics.exposition import MetricsPage
from mneme.cluster.serve import ray_client as ray_engine_client
from mneme.cluster.serve.ray_client import RayEngineClient
from tests.cluster.metric_samples import samples_of, totals_of
from tests.cluster.serve.scenarios import request, run, tokens, until
from tests.fakes.direct_calls import DirectCalls

NUM_TOKENS = 20
GENERATED = "mneme_generated_tokens_total"


def test_no_counter_falls_when_its_replica_is_late_stops_dies_or_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine_client, "STATS_TIMEOUT_S", 0.1)
    monkeypatch.setattr(ray_engine_client, "STATS_MAX_AGE_S", 0.0)
    pages: list[str] = []

    async def scenario(calls: DirectCalls, client: RayEngineClient) -> None:
        metrics = MetricsPage({"m": client}, "x")

        async def look(*replicas: str) -> str:
            await until(lambda: client.num_ready() == len(replicas))
            pages.append((await metrics.render()).decode())
            return pages[-1]

        async def use(*replicas: str) -> str:
            client.set_replicas(replicas)
            await look(*replicas)
            await asyncio.gather(
                *(tokens(client, request(f"r{i}.0", num=NUM_TOKENS, session_id=f"s{i}")) for i in range(8))
            )
            return await look(*replicas)

        await use("a", "b")
        calls.late.add("a")
        late = await look("a", "b")
        assert f'{GENERATED}{{replica="a"}}' not in samples_of(late)  # another ingress may have said more
        assert samples_of(late)['mneme_pages{replica="a",state="total"}'] == 1000
        assert samples_of(late)['mneme_report_age_seconds{replica="a"}'] > 0
        assert totals_of(late)['mneme_replicas{state="ready"}'] == 2
        calls.late.clear()
        assert samples_of(await look("a", "b"))['mneme_report_age_seconds{replica="a"}'] == 0
        await use("b")  # scaled down
        calls.kill("b")
        silent = samples_of(await look())  # until Serve lists it no more
        assert silent['mneme_report_age_seconds{replica="b"}'] > 0
        assert f'{GENERATED}{{replica="b"}}' not in silent
        calls.add("c")
        await use("c")

    run(scenario)
    highest: dict[str, float] = {}
    sums = []
    for page in pages:
        found = samples_of(page)
        counters = {name: value for name, value in found.items() if name.partition("{")[0].endswith("_total")}
        assert all(value >= highest.get(name, 0) for name, value in counters.items())
        highest |= counters
        sums.append(sum(value for name, value in counters.items() if name.startswith(GENERATED)))
    assert sums != sorted(sums)  # a sum made here would have fallen
    total = sum(value for name, value in highest.items() if name.startswith(GENERATED))
    assert total == 3 * 8 * NUM_TOKENS
    by_vllm = {name: value for name, value in highest.items() if name.startswith("vllm:generation_tokens_total")}
    assert by_vllm.keys() == {f'vllm:generation_tokens_total{{engine="{r}",model_name="m"}}' for r in "abc"}
    assert sum(by_vllm.values()) == total
