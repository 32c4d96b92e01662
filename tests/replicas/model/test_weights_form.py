"""What matrices are multiplied as: as the file has them, as `engine.weights` says, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mneme.config import parse
from mneme.errors import ConfigError
from mneme.kernels.linear import PlainLinear
from mneme.kernels.native.quantized import QuantizedLinear, quantize
from mneme.replicas.blend.gate import measured_on
from mneme.replicas.config import EngineConfig, WeightsForm
from mneme.replicas.engine.build import build_engine, form_of, model_fingerprint
from mneme.replicas.model.directory import load_model_config
from mneme.replicas.model.formats.quantized import QuantizedTensors
from mneme.replicas.model.parts import DecoderWeights, Experts, GatedMlp, Mlp, SeparateExperts
from mneme.replicas.model.tensors import Linears, Quantized
from mneme.replicas.model.weights import count_bytes, load_weights
from tests.kernels.native.native_variants import use_library
from tests.replicas.checkpoints import write_checkpoint
from tests.replicas.model.formats.test_gguf import converted, make_directory, write
from tests.replicas.tiered_engine import answers, run, submit


def load(directory: Path, form: WeightsForm, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(directory, load_model_config(directory), torch.device("cpu"), dtype, form=form)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama-2", directory)
    return directory


@pytest.mark.parametrize(
    ("kind", "formats"),
    [
        ("Q4_0", {"int4"}),
        ("Q4_1", {"int4"}),
        ("Q8_0", {"int8"}),
        ("Q5_0", {"int8"}),
        ("BF16", {"float32"}),
        ("F32", {"float32"}),
    ],
)
def test_auto_is_what_the_file_has(tmp_path: Path, kind: str, formats: set[str]) -> None:
    tensors, fields, _ = converted("llama", "llama-blocks")
    write(tmp_path / "m.gguf", "llama", tensors, fields, kind)
    make_directory(tmp_path)
    dense, found = load(tmp_path, "dense"), load(tmp_path, "auto")
    expected = count_bytes(tmp_path, load_model_config(tmp_path), torch.float32, "auto")
    assert (expected.num_bytes, expected.num_all_bytes) == (found.num_bytes, found.num_all_bytes)
    assert found.num_bytes.keys() == formats
    assert dense.num_bytes.keys() == {"float32"}
    x = torch.randn(40, _inputs(dense), generator=torch.Generator().manual_seed(1))
    for one, other in zip(dense.layers, found.layers, strict=True):
        wanted = one.attention.qkv(x)
        error = (other.attention.qkv(x) - wanted).norm() / wanted.norm()
        assert error < 0.02  # of rounded inputs, and in 5 bits of weights that are rounded once more


def _inputs(weights: DecoderWeights) -> int:
    return int(weights.embed(torch.tensor([0])).shape[1])


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize(
    ("kind", "own"),
    [("Q4_0", ("int8", "int4")), ("Q4_1", ("int4",)), ("Q8_0", ("int8",)), ("Q5_0", ()), ("BF16", ())],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_what_is_rounded_is_known_from_headers(
    tmp_path: Path, architecture: str, kind: str, own: tuple[str, ...], form: WeightsForm
) -> None:
    """Codes of 4 bits without minima are exact in 8. What leads into MLPs alone is rounded to 4."""
    name = {"llama": "llama-blocks", "qwen3moe": "qwen3-moe-blocks"}[architecture]
    tensors, fields, _ = converted(architecture, name)
    fields |= {"expert_feed_forward_length": 64} if architecture == "qwen3moe" else {}
    write(tmp_path / "m.gguf", architecture, tensors, fields, kind)
    make_directory(tmp_path)
    expected = count_bytes(tmp_path, load_model_config(tmp_path), torch.float32, form)
    found = load(tmp_path, form)
    assert (expected.num_bytes, expected.num_rounded_bytes) == (found.num_bytes, found.num_rounded_bytes)
    assert found.num_bytes.keys() == ({form} if form == "int8" or form in own else {"int8", "int4"})
    assert found.num_rounded_bytes == sum(size for name, size in found.num_bytes.items() if name not in own)


@pytest.mark.parametrize(("form", "most"), [("int8", 0.02), ("int4", 0.2)])
def test_any_checkpoint_may_be_rounded(llama: Path, form: WeightsForm, most: float) -> None:
    dense, found = load(llama, "dense"), load(llama, form)
    assert form in found.num_bytes
    assert sum(found.num_bytes.values()) < 0.4 * sum(dense.num_bytes.values())
    mlp = found.layers[0].mlp
    assert isinstance(mlp, GatedMlp)
    assert all(isinstance(each, QuantizedLinear) for each in (mlp.gate_up, mlp.down, found.head))
    x = torch.randn(40, _inputs(dense), generator=torch.Generator().manual_seed(1))
    wanted = dense.layers[0].mlp(x, torch.float32)
    assert (found.layers[0].mlp(x, torch.float32) - wanted).norm() < most * wanted.norm()


def test_what_chooses_experts_is_not_rounded(tmp_path: Path) -> None:
    write_checkpoint("mixtral", tmp_path)
    dense, found = load(tmp_path, "dense"), load(tmp_path, "int4")
    x = torch.randn(7, _inputs(dense))
    for one, other in zip(dense.layers, found.layers, strict=True):
        assert torch.equal(one.mlp.router(x), other.mlp.router(x))  # type: ignore[union-attr]
    assert found.num_bytes.keys() == {"int4", "int8"}


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_rounded_experts_are_those_that_their_codes_stand_for(tmp_path: Path, form: WeightsForm) -> None:
    """Of inputs that are rounded to 8 bits, too."""
    write_checkpoint("mixtral", tmp_path)
    found = load(tmp_path, form)
    x = torch.randn(40, _inputs(found), generator=torch.Generator().manual_seed(1))
    for layer in found.layers:
        mlp = layer.mlp
        assert isinstance(mlp, Experts)
        assert isinstance(mlp.experts, SeparateExperts)
        formats = (form, "int8")  # of what leads in, and out
        plain = [_dequantized(each, formats) for each in mlp.experts._experts]  # the only way to what they are made of
        wanted = replace(mlp, experts=SeparateExperts(plain))(x, torch.float32)
        error = (mlp(x, torch.float32) - wanted).norm() / wanted.norm()
        assert error < 0.02


def _dequantized(mlp: Mlp, formats: tuple[str, str]) -> GatedMlp:
    assert isinstance(mlp, GatedMlp)
    matrices = []
    for each, wanted in zip((mlp.gate_up, mlp.down), formats, strict=True):
        assert isinstance(each, QuantizedLinear)
        assert each.format == wanted
        matrices.append(PlainLinear(each.weight_rows(torch.arange(each._num_features))))
    return GatedMlp(*matrices, mlp.activation)


def test_experts_have_the_bits_of_the_widest_of_their_parts() -> None:
    """Files often have the matrices that lead out of experts in more bits."""
    linears = Linears("auto")
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    four, eight = Quantized(4, (4, 8)), Quantized(8, ())
    assert [linears.bits(stored) for stored in ((four, four), (four, eight), (four, None))] == [4, 8, None]
    assert linears.make(quantize(weight, 4), stored=(four, four)).format == "int4"
    assert not linears.num_rounded_bytes
    assert linears.make(weight, stored=(four, four)).format == "int8", "its codes could not be had: never 4 bits then"
    assert linears.num_rounded_bytes["int8"] == linears.num_bytes["int8"] > 0
    assert linears.make(weight, stored=(four, None)).format == "float32"


def test_codes_of_4_bits_stay_and_what_is_rounded_has_the_bits_that_it_needs() -> None:
    """Rounding takes more from some matrices than from others, see `Linears.bits`."""
    linears, four, eight = Linears("int4"), Quantized(4, (4, 8)), Quantized(8, (8,))
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    assert [linears.bits(stored) for stored in ((four, four), (four, eight), (four, None), (None,))] == [4, 8, 8, 8]
    assert [linears.bits((each,), least=4) for each in (four, eight, None)] == [4, 4, 4]
    assert linears.make(quantize(weight, 4), stored=(four,)).format == "int4"
    assert linears.make(weight, stored=(four,)).format == "int8", "its codes could not be had"
    assert linears.make(weight, stored=(None,), least=4).format == "int4"
    assert linears.num_rounded_bytes["int4"] < linears.num_bytes["int4"]


@pytest.mark.parametrize(("group", "bits"), [(128, 4), (32, 4), (-1, 4), (16, 8), (48, 8)])
def test_groups_that_32_does_not_divide_have_8_bits(group: int, bits: int) -> None:
    """Their 4 bits are on no grid of 32 inputs."""
    files = SimpleNamespace(model_dir=Path(), names=["a.qweight"])
    files.has = files.names.__contains__
    said = {"quant_method": "gptq", "bits": 4, "group_size": group}
    found = QuantizedTensors(files, said, torch.device("cpu"), torch.float32).quantized("a.weight")
    assert found == (bits, (4, 8) if bits == 4 else ())


def test_a_form_is_part_of_the_fingerprint(llama: Path) -> None:
    config = load_model_config(llama)
    forms: tuple[WeightsForm, ...] = ("dense", "int8", "int4")
    found = {model_fingerprint(llama, config, torch.float32, form).digest for form in forms}
    assert len(found) == len(forms)
    assert model_fingerprint(llama, config, torch.float32).digest in found
    reports = {str(measured_on(model_fingerprint(llama, config, torch.float32, form))) for form in forms}
    assert len(reports) == len(forms), "a quality report is for one form"
    assert form_of("auto", {"float32": 1}) == "dense"
    assert form_of("auto", {"int4": 1, "int8": 1}) == "auto"


def test_what_kv_is_stored_as_is_part_of_the_fingerprint(llama: Path) -> None:
    """And with 8 bits what it was computed in."""
    config, dtypes = load_model_config(llama), (torch.float32, torch.bfloat16)
    found = [model_fingerprint(llama, config, dtype, kv_dtype=kv) for dtype in dtypes for kv in (None, torch.int8)]
    assert len({each.digest for each in found}) == len({str(measured_on(each)) for each in found}) == 4
    assert model_fingerprint(llama, config, torch.float32, kv_dtype=torch.float32).digest == found[0].digest
    assert found[1].layout.chunk_bytes == found[0].layout.chunk_bytes * (config.head_dim + 4) // (4 * config.head_dim)


def test_fp8_is_for_gpus() -> None:
    with pytest.raises(ConfigError, match=r"engine.weights: fp8 needs a GPU of compute capability 8\.9 or later"):
        build_engine("mneme-tiny", parse(EngineConfig, {"device": "cpu", "dtype": "bfloat16", "weights": "fp8"}))
    assert form_of("fp8", {"fp8": 1, "bfloat16": 1}) == "fp8"


def test_fp8_of_other_sizes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fp8: 16 must divide both sizes of a matrix \(got \[24, 32\]\)"):
        Linears("fp8").make(torch.zeros(24, 32), stored=(None,))


def test_a_form_that_nothing_multiplies_is_refused() -> None:
    with use_library(None), pytest.raises(ConfigError, match=r"engine.weights: int8 needs a CPU, a C\+\+ compiler"):
        build_engine("mneme-tiny", parse(EngineConfig, {"device": "cpu", "dtype": "float32", "weights": "int8"}))


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_an_answer_does_not_depend_on_who_is_beside_it(form: str) -> None:
    """Prompts alone, and together: rounded products keep a row's bits, as dense ones do."""
    config = parse(EngineConfig, {"device": "cpu", "dtype": "float32", "weights": form, "num_pages": 200})
    engine = build_engine("mneme-tiny", config)
    prompts = [list(range(10 + i, 60 + 3 * i)) for i in range(5)]
    alone = []
    for ids in prompts:
        submit(engine, "alone", ids, 12)
        alone.append(answers(run(engine))["alone"])
    for i, ids in enumerate(prompts):
        submit(engine, str(i), ids, 12)
    together = answers(run(engine))
    engine.close()
    assert [together[str(i)] for i in range(5)] == alone
