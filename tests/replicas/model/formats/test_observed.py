"""Rounding to 4 bits by what inputs of products are: the model reads drawn tokens once, dense."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mneme.errors import ConfigError
from mneme.kernels.native.quantized import QuantizedLinear, quantize
from mneme.replicas.config import WeightsForm
from mneme.replicas.model.directory import load_model_config
from mneme.replicas.model.families.table import FAMILIES
from mneme.replicas.model.formats.observed import Observed, ObservedLinear, observe
from mneme.replicas.model.parts import DecoderWeights, GatedMlp
from mneme.replicas.model.weights import build, load_weights, open_files
from tests.replicas.checkpoints import write_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose norms leave some channels large, as trained ones do."""
    directory = tmp_path_factory.mktemp("uneven")
    write_checkpoint("llama-3", directory)
    path, draw = directory / "model.safetensors", torch.Generator().manual_seed(3)
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("layernorm.weight")]:
        tensors[name] = torch.randn(tensors[name].shape, generator=draw).mul(2).exp()
    save_file(tensors, path)
    return directory


def observed(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[Observed, DecoderWeights]:
    config, linears = load_model_config(directory), Observed()
    with ExitStack() as stack:
        files = open_files(directory, CPU, dtype, stack)
        weights = build(FAMILIES[config.family], files, config, linears=linears)
    observe(config, weights)
    return linears, weights


def test_squares_are_those_of_the_inputs(uneven: Path) -> None:
    """Of the first layer's, which can be computed here, to an eighth of an octave."""
    linears, weights = observed(uneven)
    config, layer = load_model_config(uneven), weights.layers[0]
    ids = torch.randint(config.vocab_size, (512,), generator=torch.Generator().manual_seed(0))
    squares = linears.squares()
    assert len(squares) == 4 * config.num_layers + 1
    attention = [i for i, each in enumerate(linears._made) if each is layer.attention.qkv]  # whose square it is
    (found,) = (squares[i] for i in attention)
    assert found is not None
    wanted = layer.attention_norm(weights.embed(ids)).square().mean(0)
    assert ((found / wanted).log2().abs() <= 0.126).all()
    assert all(each is not None and each.isfinite().all() for each in squares)


@pytest.mark.parametrize("name", ["gemma-3", "mixtral", "gpt-oss", "falcon-40b", "opt"])
def test_every_family_is_observed(name: str, tmp_path: Path) -> None:
    """Windows, experts, of which some may have no rows, and others' attention."""
    write_checkpoint(name, tmp_path)
    linears, _ = observed(tmp_path, torch.bfloat16)
    found = [each for each in linears.squares() if each is not None]
    assert all(each.isfinite().all() and (each >= 0).all() for each in found)
    assert len(found) > len(linears.squares()) // 2
    load_weights(tmp_path, load_model_config(tmp_path), CPU, torch.bfloat16, form="int4")


def test_an_input_that_nobody_had_is_not_known() -> None:
    linear = ObservedLinear(QuantizedLinear(quantize(torch.ones(4, 32), 8)), 32)
    assert linear.squares() is None
    linear(torch.full((3, 32), 2.0))
    linear(torch.zeros(1, 32))
    assert torch.equal(linear.squares(), torch.full((32,), 2 ** (round(4 * torch.tensor(3.0).log2().item()) / 4)))


def test_a_dense_model_for_which_there_is_no_room_is_not_rounded_to_4_bits(
    uneven: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is read: in 8 bits it is never dense as a whole."""
    monkeypatch.setattr("mneme.replicas.model.weights.available_bytes", lambda: 1 << 10)
    config = load_model_config(uneven)
    with pytest.raises(ConfigError, match=r"engine.weights: 4 bits are rounded of the dense model, 0.0 GiB"):
        load_weights(uneven, config, CPU, torch.float32, form="int4")
    load_weights(uneven, config, CPU, torch.float32, form="int8")


def test_rounding_is_better_for_what_the_model_reads(uneven: Path) -> None:
    """Against rounding that knows no inputs, on other tokens: each product of each layer together."""
    config = load_model_config(uneven)
    form: WeightsForm = "int4"
    ours = load_weights(uneven, config, CPU, torch.float32, form=form)
    dense = load_weights(uneven, config, CPU, torch.float32)
    x = dense.embed(torch.arange(1, 300))
    lost = [0.0, 0.0]
    for layer, exact in zip(ours.layers, dense.layers, strict=True):
        assert isinstance(layer.mlp, GatedMlp)
        assert isinstance(exact.mlp, GatedMlp)
        assert exact.mlp_norm is not None
        normed = exact.mlp_norm(x)
        rows = torch.arange(2 * config.intermediate_size)
        weight = exact.mlp.gate_up.weight_rows(rows)
        wanted = normed @ weight.T
        blind = QuantizedLinear(quantize(weight, 4))
        for i, linear in enumerate((layer.mlp.gate_up, blind)):
            found = normed @ linear.weight_rows(rows).T
            lost[i] += ((found - wanted).norm() / wanted.norm()).item()
    assert lost[0] < 0.7 * lost[1]
