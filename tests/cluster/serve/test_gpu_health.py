"""A replica's GPU, through an NVML whose figures the tests set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from mneme.cluster.metrics.exposition import MetricsPage
from mneme.cluster.serve.gpu_health import GpuHealth, own_gpu
from mneme.cluster.serve.replica import ReplicaServer
from mneme.errors import ReplicaUnavailable
from tests.cluster.api_fixtures import TOKENIZER
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.cluster.metric_samples import samples_of
from tests.fakes.fake_engine import FakeEngineLoop

UUID = "GPU-1"


class Device:
    """One GPU as NVML says; what is in `missing` it does not have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.xids: list[int] = []
        self.num_ecc = 2
        self.is_lost = False
        self.missing: set[str] = set()
        self.asked: list[Any] = []
        answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByIndex": self.asked.append,
            "nvmlDeviceGetHandleByUUID": self.asked.append,
            "nvmlDeviceGetUUID": lambda handle: UUID,
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=30, total=80),
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=75),
            "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: self.num_ecc,
            "nvmlEventSetCreate": lambda: "events",
            "nvmlDeviceRegisterEvents": lambda handle, kinds, events: None,
            "nvmlEventSetWait_v2": lambda events, timeout_ms: self._next_event(),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, self._guarded(name, answer))

    def _guarded(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            if self.is_lost:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            if name in self.missing:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return answer(*args)

        return ask

    def _next_event(self) -> Any:
        if not self.xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(eventData=self.xids.pop(0))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    return Device(monkeypatch)


def opened() -> GpuHealth:
    gpu = own_gpu()
    assert gpu is not None
    return gpu


@pytest.mark.parametrize(("visible", "asked"), [("3", 3), ("3,4", 3), (UUID, UUID), ("MIG-7", "MIG-7")])
def test_the_gpu_is_the_first_that_the_process_may_use(
    device: Device, monkeypatch: pytest.MonkeyPatch, visible: str, asked: int | str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert opened().name == UUID
    assert device.asked == [asked]


def test_a_device_without_some_figures_has_the_others(device: Device) -> None:
    device.missing |= {"nvmlDeviceGetTotalEccErrors", "nvmlEventSetCreate", "nvmlDeviceGetUtilizationRates"}
    found = opened().read()
    assert found.keys() == {"gpu", "problem", "memory", "xids"}
    assert found["problem"] is None


def test_errors_of_programs_and_of_before_are_no_problem(device: Device) -> None:
    gpu = opened()
    device.xids = [13, 31, 31]
    found = gpu.read()
    assert (found["problem"], found["xids"], found["ecc_uncorrected"]) == (None, {"device": 0, "program": 3}, 2)


@pytest.mark.parametrize("fault", ["xid", "ecc", "lost"])
def test_what_is_wrong_with_the_device_stays_wrong(device: Device, fault: str) -> None:
    gpu = opened()
    if fault == "xid":
        device.xids = [31, 79]
    elif fault == "ecc":
        device.num_ecc += 1
    device.is_lost = fault == "lost"
    problem = gpu.read()["problem"]
    assert problem is not None
    assert {"xid": "Xid 79", "ecc": "1 uncorrected ECC errors", "lost": "NVML: "}[fault] in problem
    device.is_lost = False
    assert gpu.read()["problem"] == problem


def test_an_unhealthy_gpu_drains_its_replica_which_fails_its_health_checks(device: Device) -> None:
    async def scenario() -> None:
        engine = FakeEngineLoop()
        server = ReplicaServer("r", engine, gpu=opened())
        await server.check_health()
        device.xids = [79]
        with pytest.raises(ReplicaUnavailable, match="Xid 79"):
            await server.check_health()
        stream = server.events(replica_id="r", subscriber="s")
        await anext(stream)
        refusals = await server.submit_many(replica_id="r", subscriber="s", requests=[None])  # type: ignore[list-item]
        assert [type(refusal) for refusal in refusals] == [ReplicaUnavailable]
        await server.begin_drain(0.0)
        await stream.aclose()

    asyncio.run(scenario())


def test_figures_of_gpus_are_metrics_once_for_each(device: Device) -> None:
    device.xids = [79]
    gpu = opened()

    class Client(FakeEngineClient):
        async def stats(self) -> dict[str, dict[str, Any]]:
            return {name: {"gpu": gpu.read()} for name in "ab"}

    page = asyncio.run(MetricsPage({"m": Client(TOKENIZER)}, "i").render()).decode()
    found = samples_of(page)
    assert found[f'mneme_gpu_memory_bytes{{gpu="{UUID}",state="used"}}'] == 30
    assert found[f'mneme_gpu_xid_errors_total{{gpu="{UUID}",of="device"}}'] == 1
    assert found[f'mneme_gpu_unhealthy{{gpu="{UUID}"}}'] == 1
