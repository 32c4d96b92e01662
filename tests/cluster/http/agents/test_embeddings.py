"""/v1/embeddings: what goes to the engine, how vectors come back, what is refused."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from tests.cluster.api_fixtures import TOKENIZER, post
from tests.cluster.fake_engine_client import FakeEngineClient


def embed(engine: FakeEngineClient | None = None, **fields: Any) -> Any:
    return post("/v1/embeddings", {"model": "tiny", "input": "the fox", **fields}, engine=engine)


def test_each_text_has_a_vector_and_shares_nothing() -> None:
    engine = FakeEngineClient(TOKENIZER)
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
    assert embed(normalize=False).json()["data"][0]["embedding"] == [3.0, 0.0, -4.0]
    encoded = embed(encoding_format="base64").json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == pytest.approx([0.6, 0.0, -0.8])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", [1]]}, "input[1]"),
        ({"input": [10**9]}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "the fox " * 2000}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 4}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
    ],
)
def test_bad_requests_are_named(fields: dict[str, Any], param: str) -> None:
    response = embed(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
