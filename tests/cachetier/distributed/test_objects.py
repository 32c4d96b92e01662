"""How many objects of a chunk are asked for at once; without Ray."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mneme.cachetier.chunk.header import Miss, U8Array
from mneme.cachetier.distributed import objects as ray_sources
from mneme.cachetier.distributed.objects import ObjectLayers, Refs
from tests.cachetier.chunks import CHUNK_TOKENS, chain_of

CHUNK = chain_of(list(range(1, CHUNK_TOKENS + 1)))[0]
NUM_LAYERS = len(CHUNK.layers)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Refs]:
    """A layer is an object, and a reference its number."""
    asked: list[Refs] = []

    def get_runs(refs: Refs, timeout_s: float) -> list[tuple[U8Array, ...]] | Miss:
        asked.append(("get", *refs))
        return [(CHUNK.layers[ref],) for ref in refs]

    def begin_pull(refs: Sequence[int]) -> None:
        asked.append(("pull", *refs))

    monkeypatch.setattr(ray_sources, "get_runs", get_runs)
    monkeypatch.setattr(ray_sources, "begin_pull", begin_pull)
    monkeypatch.setattr(ray_sources, "layers_per_object", lambda layer_bytes: 1)
    return asked


def read_all(layers: ObjectLayers) -> None:
    for number, expected in enumerate(CHUNK.layers):
        found = layers(number)
        assert not isinstance(found, Miss)
        assert (found == expected).all()


def test_what_is_on_the_node_is_had_by_one_call(asked: list[Refs]) -> None:
    layers = ObjectLayers(CHUNK.header, lambda: tuple(range(NUM_LAYERS)), is_here=True)
    read_all(layers)
    assert asked == [("get", *range(NUM_LAYERS))]
    assert layers(NUM_LAYERS) is Miss.SHORT


def test_of_another_node_the_next_object_comes_while_one_is_used(asked: list[Refs]) -> None:
    read_all(ObjectLayers(CHUNK.header, lambda: tuple(range(NUM_LAYERS))))
    expected = [call for n in range(NUM_LAYERS) for call in (("get", n), ("pull", *range(n + 1, NUM_LAYERS)[:1]))]
    assert asked == expected
