"""What a model's directory says of sampling, and where its weights are: heeded, or refused by the name of the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mneme.errors import CheckpointError, InvalidRequest
from mneme.replicas.card import sampling_defaults, shard_paths
from mneme.replicas.model.directory import model_directory
from mneme.replicas.request import SamplingParams, Weighing

INDEX = "model.safetensors.index.json"


def says(directory: Path, **values: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


def test_values_of_sampling_are_taken_and_others_are_not(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path, "auto") == {}
    others = {"do_sample": False, "eos_token_id": [1, 2], "max_length": 20, "typical_p": 0.5, "top_p": None}
    values = {"temperature": 0.6, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05}
    says(tmp_path, **others, **values, max_new_tokens=512)
    assert sampling_defaults(tmp_path, "auto") == {**values, "max_tokens": 512}
    assert sampling_defaults(tmp_path, "none") == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature: must be a number from 0 to 2 (got -1)"),
        ({"top_p": 0}, "top_p: must be a number over 0 up to 1"),
        ({"top_k": 2.5}, "top_k: must be an integer"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be an integer from 1"),
        ({"repetition_penalty": "1.1"}, "repetition_penalty: must be a number"),
    ],
)
def test_a_value_out_of_range_is_named_with_the_way_around_it(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError) as raised:
        sampling_defaults(says(tmp_path, **values), "auto")
    assert f"generation_config.json: {message}" in str(raised.value)
    assert "engine.generation_config: none" in str(raised.value)
    assert sampling_defaults(tmp_path, "none") == {}


def test_what_is_not_given_is_the_models_else_neutral() -> None:
    given = SamplingParams(top_p=0.5, top_k=0)
    assert given.weighing == Weighing(top_p=0.5)
    filled = given.with_defaults({"temperature": 0.25, "top_p": 0.75, "top_k": 9, "max_tokens": 3})
    assert filled == SamplingParams(temperature=0.25, top_p=0.5, top_k=0)
    assert filled.weighing == Weighing(temperature=0.25, top_p=0.5)
    assert given.with_defaults({}) is given
    with pytest.raises(InvalidRequest, match="min_p"):
        given.with_defaults({"min_p": 2})


def test_weights_are_in_one_file_or_in_all_that_an_index_names(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path}: has neither model.safetensors nor {INDEX}"):
        shard_paths(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert shard_paths(tmp_path) == [tmp_path / "model.safetensors"]
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {f"t{i}": shards[i % 3] for i in range(9)}}))
    with pytest.raises(
        CheckpointError, match=f"{tmp_path}/{shards[0]}: no such file \\(3 of 3 are missing\\), which {INDEX}"
    ):
        shard_paths(tmp_path)
    (tmp_path / shards[0]).touch()
    (tmp_path / shards[2]).touch()
    with pytest.raises(CheckpointError, match=f"{tmp_path}/{shards[1]}: no such file, which {INDEX} names"):
        shard_paths(tmp_path)
    (tmp_path / shards[1]).touch()
    assert shard_paths(tmp_path) == [tmp_path / name for name in shards]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("pytorch_model-00001-of-00002.bin", "PyTorch's pickles"),
        ("consolidated.00.pth", "PyTorch's pickles"),
        ("tf_model.h5", "another framework's"),
    ],
)
@pytest.mark.parametrize("given", [lambda file: file, lambda file: file.parent], ids=["file", "directory"])
def test_weights_in_another_form_are_told_what_they_are_and_what_helps(
    tmp_path: Path, name: str, form: str, given: Callable[[Path], Path]
) -> None:
    (tmp_path / name).touch()
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(CheckpointError) as raised:
        model_directory(str(given(tmp_path / name)))
    message = str(raised.value)
    assert message.startswith(f"{tmp_path / name}: weights in {form} form are not loaded, safetensors are; ")
    assert "save_pretrained" in message
    assert len(message.splitlines()) == 1
    (tmp_path / "model.safetensors").touch()  # beside safetensors they are nobody's concern
    assert model_directory(str(tmp_path)) == tmp_path


def test_a_file_of_a_model_is_not_its_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"model.safetensors: is a file; name the directory that it is in"):
        model_directory(str(tmp_path / "model.safetensors"))
