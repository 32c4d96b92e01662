"""`mneme models`: which models are here or known by name, whether they are served, and what they take."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from mneme.cache_folder import cache_folder
from mneme.cachetier.chunk.fingerprint import ChunkLayout
from mneme.errors import CheckpointError, ConfigError, MnemeError, shown
from mneme.replicas.card import read_json, shard_paths
from mneme.replicas.config import EMBEDDED_MODEL
from mneme.replicas.model.decoder_config import DecoderConfig
from mneme.replicas.model.directory import PACKAGED, load_model_config, model_directory, weights_of_groups
from mneme.replicas.model.families.table import FAMILIES

_GIB = 2**30
_BYTES = {"float32": 4}  # of a number; else 2
_BESIDE_WEIGHTS = ("scales", "qzeros", "g_idx", "_scale", "_scale_inv", "_zero_point", "weight_shape")


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, help="also list the model directories in this folder")
    parser.add_argument("--json", action="store_true", help="one line of JSON")


def models(args: argparse.Namespace) -> int:
    """List the embedded model, packaged ones, those in the hub's cache and those of a folder."""
    rows = [*_known(), *_of_hub(), *(() if args.folder is None else _of_folder(args.folder))]
    if args.json:
        print(json.dumps({"models": rows, "families": sorted(FAMILIES)}))
        return 0
    for row in rows:
        print(f"{row['name']:<44} {_shown(row)}")
    print(f"\nfamilies: {', '.join(sorted(FAMILIES))} (docs/adding-a-model.md)")
    return 0


def _shown(row: dict[str, Any]) -> str:
    if "problem" in row:
        return f"not served: {row['problem']}"
    if "weights_bytes" not in row:
        return str(row["about"])
    weights, kv = row["weights_bytes"] / _GIB, row["kv_bytes_per_1k_tokens"] / 2**20
    return f"{row['family']}, {weights:.2f} GiB of weights in {row['dtype']}, {kv:.1f} MiB of KV per 1,000 tokens"


def _known() -> Iterator[dict[str, Any]]:
    yield described(EMBEDDED_MODEL, model_directory(EMBEDDED_MODEL))
    for name, packaged in PACKAGED.items():
        made = sorted((cache_folder() / "models").glob(f"{Path(packaged.file).stem}-*/config.json"))
        is_here = bool(made)
        yield (
            described(name, made[-1].parent) if is_here else {"name": name, "about": f"{packaged.about}; not here yet"}
        )


def _of_hub() -> Iterator[dict[str, Any]]:
    """Yield what the hub's cache holds of models."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda each: each.repo_id):
        if repo.repo_type == "model" and repo.revisions:
            newest = max(repo.revisions, key=lambda each: each.last_modified)
            yield described(repo.repo_id, newest.snapshot_path)


def _of_folder(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the model directories and the GGUF files in a folder; raises `ConfigError` where it is none."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"folder: {shown(str(folder))} cannot be listed: {error.strerror}") from error
    for path in paths:
        is_file = path.is_file() and path.suffix == ".gguf"
        if is_file or (path / "config.json").exists() or any(path.glob("*.gguf")):
            yield described(str(path), path)


def described(name: str, directory: Path) -> dict[str, Any]:
    """Say what a model takes, or why it is not served; its weights are what their files hold, by the engine's dtype."""
    try:
        directory = model_directory(str(directory))  # of a GGUF file
        config = load_model_config(directory)
        num_weights = _num_weights(directory)
    except MnemeError as error:
        return {"name": name, "problem": str(error)}
    size = _BYTES.get(config.dtype, 2)
    return {
        "name": name,
        "family": config.family,
        "dtype": "float32" if size == 4 else "bfloat16",
        "max_context": config.max_context,
        "weights_bytes": num_weights * size,
        "kv_bytes_per_1k_tokens": _kv_bytes(config, "float32" if size == 4 else "bfloat16"),
        "int8_kv_bytes_per_1k_tokens": _kv_bytes(config, "int8"),
    }


def _kv_bytes(config: DecoderConfig, dtype: str) -> int:
    layers, heads = config.num_layers, config.num_kv_heads
    layout = ChunkLayout(num_layers=layers, num_kv_heads=heads, head_dim=config.head_dim, dtype=dtype)
    return layers * layout.layer_bytes(1000)


def _num_weights(directory: Path) -> int:
    """Count the numbers of all tensors by the files' headers, packed ones as what they are unpacked to."""
    from mneme.replicas.model.formats.gguf_file import GgufFile

    quantization = read_json(directory / "config.json").get("quantization_config") or {}
    bits = weights_of_groups(quantization).get("num_bits", 4)
    per_word = {"qweight": 32 // quantization.get("bits", 4), "weight_packed": 32 // bits, "_blocks": 2}
    total = 0
    for path in shard_paths(directory):
        if path.suffix == ".gguf":
            total += sum(prod(info.shape) for info in GgufFile(path).tensors.values())
            continue
        for name, shape in _shapes(path).items():
            if not name.endswith(_BESIDE_WEIGHTS):
                total += prod(shape) * next((num for end, num in per_word.items() if name.endswith(end)), 1)
    return total


def _shapes(path: Path) -> dict[str, list[int]]:
    """The shapes of a safetensors file, by its header; raises `CheckpointError` for one that is not sound."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(size))
        return {name: list(info["shape"]) for name, info in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a sound safetensors file ({error})") from error
