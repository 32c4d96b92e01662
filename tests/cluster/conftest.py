"""An API over a fake engine, or over two real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from tests.cluster.api_fixtures import TOKENIZER, api
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.cluster.real_engines import TwoEngines, over


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient(TOKENIZER)


@pytest.fixture
def client(engine: FakeEngineClient) -> TestClient:
    return api(engine)


@pytest.fixture
def engines() -> Iterator[TwoEngines]:
    with over() as (_, engines):
        yield engines
