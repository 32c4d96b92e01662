"""/v1/embeddings: what goes to the engine, how vectors come back, what is refused."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from mneme.replicas.request import GenerationRequest, TokenEvent
from tests.cluster.api_fixtures import TOKENIZER, post
from tests.cluster.fake_engine_client import FakeEngineClient
from tests.cluster.serve.test_deadlines import ask

BODY = {"model": "tiny", "input": "the fox"}


def embed(engine: FakeEngineClient | None = None, **fields: Any) -> Any:
    return post("/v1/embeddings", {**BODY, **fields}, engine=engine)


def test_each_text_has_a_vector_and_shares_nothing(engine: FakeEngineClient) -> None:
    ids = TOKENIZER.encode("the fox", add_special_tokens=True)
    found = embed(engine, input=["the fox", "the fox", "quick"], pooling="mean").json()
    assert [(each["object"], each["index"]) for each in found["data"]] == [("embedding", i) for i in range(3)]
    assert found["data"][0]["embedding"] == pytest.approx([0.6, 0.0, -0.8])
    assert len({request.kv_salt for request in engine.requests}) == 3
    assert {(request.pooling, request.sampling.max_tokens) for request in engine.requests} == {("mean", 1)}
    assert list(engine.requests[0].prompt_token_ids) == ids
    num_tokens = sum(len(request.prompt_token_ids) for request in engine.requests)
    assert found["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    embed(engine, input=[ids, ids])
    assert engine.requests[-1].prompt_token_ids == engine.requests[0].prompt_token_ids


def test_vectors_are_cut_and_encoded_as_openai_does() -> None:
    cut = embed(dimensions=1).json()["data"][0]["embedding"]
    assert cut == [1.0]
    assert embed(dimensions=4).json()["error"]["param"] == "dimensions"  # the model has 3
    assert embed(normalize=False).json()["data"][0]["embedding"] == [3.0, 0.0, -4.0]
    encoded = embed(encoding_format="base64").json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == pytest.approx([0.6, 0.0, -0.8])


@pytest.mark.parametrize(("max_waiting", "sizes"), [(1024, [256, 256, 88]), (250, [250, 250, 100])])
def test_many_texts_run_in_groups_that_leave_room_in_the_queue(max_waiting: int, sizes: list[int]) -> None:
    engine, groups = FakeEngineClient(TOKENIZER), list[int]()
    generate = engine.generate

    def counted(requests: Sequence[GenerationRequest]) -> AsyncIterator[TokenEvent]:
        assert not engine.running
        groups.append(len(requests))
        return generate(requests)

    engine.generate = counted  # type: ignore[method-assign]
    found = ask(engine, "/v1/embeddings", {**BODY, "input": ["a"] * 600}, max_waiting=max_waiting).json()
    assert groups == sizes
    assert [each["index"] for each in found["data"]] == list(range(600))


def test_all_groups_share_one_deadline(engine: FakeEngineClient) -> None:
    path, body = "/v1/embeddings", {**BODY, "input": ["a"] * 600}
    assert ask(engine, path, body).status_code == 200
    assert ask(engine, path, {**body, "timeout_s": 10000}).status_code == 200
    first, second, third = (engine.requests[600 + index].timeout_s or 0 for index in (0, 256, 512))
    assert 10000 > first > second > third > 0
    assert ask(engine, path, {**body, "timeout_s": 2}).status_code == 504
    assert len(engine.requests) == 1200 + 256
