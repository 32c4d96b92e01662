"""Keys of chunks: what they depend on, and what they do not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mneme.cachetier.chunk.fingerprint import ChunkLayout, ModelFingerprint
from mneme.cachetier.chunk.keys import encoded, prefix_lineage, session_lineage
from mneme.cachetier.names import tenant_id
from mneme.errors import ConfigError
from tests.cachetier.chunks import FINGERPRINT, LINEAGE

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)

_SCRIPT = """
from tests.cachetier.chunks import FINGERPRINT
from mneme.cachetier.chunk.keys import prefix_lineage, session_lineage
for lineage in (prefix_lineage(FINGERPRINT, "s"), session_lineage(FINGERPRINT, "s", "a", b"b")):
    print(lineage.chain([5, 6, 7], 2)[-1].key.hex())
"""


def test_keys_are_the_same_in_every_process() -> None:
    """The values are part of the format: files of an earlier version are found by them."""
    expected = ["3a6ba92f67a1bfe86a29fe9a89fe8d33", "f55ce5325bf7527c936602f9c185a7d1"]
    for seed in ("0", "1", "random"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120, check=False, env=environment
        )
        assert done.stdout.split() == expected, done.stderr


def test_keys_depend_on_everything_that_kv_depends_on() -> None:
    layout = FINGERPRINT.layout
    fingerprints = [
        FINGERPRINT,
        replace(FINGERPRINT, weights="x"),
        replace(FINGERPRINT, inv_freq=(1.0, 0.2)),
        replace(FINGERPRINT, attention_factor=1.1),
        replace(FINGERPRINT, architecture="eps=1e-5"),
        replace(FINGERPRINT, tensor_parallel=(0, 2)),
        replace(FINGERPRINT, tensor_parallel=(1, 2)),
        *(
            replace(FINGERPRINT, layout=replace(layout, **{name: getattr(layout, name) + 1}))
            for name in ("num_layers", "num_kv_heads", "head_dim", "chunk_tokens")
        ),
        replace(FINGERPRINT, layout=replace(layout, dtype="bfloat16")),
    ]
    lineages = [
        lineage
        for fingerprint in fingerprints
        for salt in ("", "a")
        for lineage in (
            prefix_lineage(fingerprint, salt),
            session_lineage(fingerprint, salt, "a"),
            session_lineage(fingerprint, salt, "ab"),
        )
    ]
    keys = {key for lineage in lineages for key in (lineage.root, lineage.chain([4, 5], 8)[0].key)}
    assert len(keys) == 2 * len(lineages)
    same_parent = {lineage.key(bytes(16), [4, 5]) for lineage in lineages}
    assert len(same_parent) == len(lineages)  # not by the root alone: a client that names a parent gains nothing


def test_fields_cannot_run_into_each_other() -> None:
    assert session_lineage(FINGERPRINT, "salt", "").root != session_lineage(FINGERPRINT, "", "salt").root


@given(TOKENS, TOKENS)
def test_different_tokens_have_different_keys(one: list[int], other: list[int]) -> None:
    assert (LINEAGE.key(LINEAGE.root, one) == LINEAGE.key(LINEAGE.root, other)) == (one == other)


@given(TOKENS, st.integers(1, 9))
def test_a_chain_is_its_keys_one_by_one(token_ids: list[int], chunk_tokens: int) -> None:
    parent, end = LINEAGE.root, 0
    for item in LINEAGE.chain(token_ids, chunk_tokens):
        assert (item.start, item.parent) == (end, parent)
        assert item.end == min(item.start + chunk_tokens, len(token_ids))
        assert item.key == LINEAGE.key(parent, token_ids[item.start : item.end])
        parent, end = item.key, item.end
    assert end == len(token_ids)


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<i8", ">u4", "<u2"])
def test_byte_order_and_width_do_not_matter(dtype: str) -> None:
    assert LINEAGE.key(LINEAGE.root, np.array([1, 700, 3], dtype)) == LINEAGE.key(LINEAGE.root, [1, 700, 3])


def test_a_lineage_shows_its_tenant_and_neither_salt_nor_secret() -> None:
    lineage = prefix_lineage(FINGERPRINT, "tenant-7")
    assert lineage.tenant == tenant_id("tenant-7") != tenant_id("tenant-8")
    assert "secret" not in repr(lineage)
    assert "tenant-7" not in repr(lineage)
    assert lineage == prefix_lineage(FINGERPRINT, "tenant-7")


def test_a_fingerprint_forgets_the_last_bits_of_a_frequency() -> None:
    nearly = ModelFingerprint(weights="w", layout=FINGERPRINT.layout, inv_freq=(1.0, float(np.nextafter(0.1, 1))))
    assert nearly.digest == FINGERPRINT.digest


@pytest.mark.parametrize("token_ids", [[-1], [2**31], [[1]], [1.5], ["a"], np.array([1.0])])
def test_what_is_no_token_id_is_refused(token_ids: object) -> None:
    with pytest.raises(ValueError, match="token_ids"):
        encoded(token_ids)  # type: ignore[arg-type]


def test_a_parent_that_is_no_key_is_refused() -> None:
    with pytest.raises(ValueError, match="parent"):
        LINEAGE.key(b"short", [1])


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "int4"), ("num_layers", 0), ("head_dim", 5000), ("chunk_tokens", 5000)]
)
def test_absurd_layouts_are_refused(field: str, value: object) -> None:
    fields = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "dtype": "float32"} | {field: value}
    with pytest.raises(ConfigError, match=field):
        ChunkLayout(**fields)  # type: ignore[arg-type]


def test_beginnings_are_the_keys_of_shorter_chunks() -> None:
    lineage, ids = LINEAGE, [5, 6, 7, 8]
    keys = [lineage.key(lineage.root, ids[:length]) for length in (4, 3, 2, 1)]
    assert lineage.beginnings(lineage.root, ids) == keys
    assert lineage.beginnings(lineage.root, ids, {3, 1, 9}) == [keys[1], keys[3]]
    assert lineage.beginnings(keys[0], ids)[0] == lineage.key(keys[0], ids)
    assert lineage.beginnings(lineage.root, []) == []
