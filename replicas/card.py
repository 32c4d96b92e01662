"""What a model's directory says beside its configuration and vocabulary: how to sample, and in which files it is.

Torch-free: what is wrong with a directory is said before anything is started.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mneme.errors import CheckpointError, InvalidRequest, shown
from mneme.replicas.config import GenerationConfigUse
from mneme.replicas.request import SamplingDefaults, SamplingParams

GENERATION_CONFIG = "generation_config.json"
GGUF = "model.gguf"  # a link to the file, in a directory that was made for one
_INDEX = "model.safetensors.index.json"
# Fields of generation_config.json that say how to sample, and what `SamplingParams` calls them.
_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_SAMPLING["max_new_tokens"] = "max_tokens"
_RESAVE = "`AutoModelForCausalLM.from_pretrained({source}).save_pretrained(NEW)` of transformers writes them"
# Other forms of weights by the ending of their files: what they are, and how safetensors are made of them.
_OTHER_WEIGHTS = {
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), ("PyTorch's pickles", _RESAVE.format(source="DIR"))),
    **dict.fromkeys((".onnx", ".h5", ".msgpack"), ("another framework's", _RESAVE.format(source="DIR"))),
}


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object, empty if there is no file; raises `CheckpointError`."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({type(error).__name__})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return content


def sampling_defaults(model_dir: Path, use: GenerationConfigUse) -> SamplingDefaults:
    """Return what generation_config.json says of sampling; raises `CheckpointError` that names the field.

    As in vLLM values count whatever `do_sample` says, which files often have beside values that it would void.
    """
    found = read_json(model_dir / GENERATION_CONFIG) if use == "auto" else {}
    values = {ours: found[name] for name, ours in _SAMPLING.items() if found.get(name) is not None}
    try:
        SamplingParams(**values)
    except InvalidRequest as error:
        name = next(name for name, ours in _SAMPLING.items() if ours == error.field)
        rule = f"{error.rule} (got {shown(error.value)}); engine.generation_config: none leaves the file unread"
        raise CheckpointError(f"{model_dir / GENERATION_CONFIG}: {name}: {rule}") from None
    return values


def refuse_other_weights(files: Iterable[Path]) -> None:
    """Raise `CheckpointError` with what the first of these files is that holds weights in another form, if one does."""
    for file in sorted(files):
        if file.suffix in _OTHER_WEIGHTS:
            form, remedy = _OTHER_WEIGHTS[file.suffix]
            raise CheckpointError(f"{file}: weights in {form} form are not loaded, safetensors are; {remedy}")


def shard_paths(model_dir: Path) -> list[Path]:
    """List the files that hold the weights; raises `CheckpointError` for one that is missing, or an index not sound."""
    index_path = model_dir / _INDEX
    if (model_dir / GGUF).exists():
        return [model_dir / GGUF]
    if not index_path.exists():
        path = model_dir / "model.safetensors"
        if not path.is_file():
            raise CheckpointError(f"{model_dir}: has neither {path.name} nor {_INDEX}")
        return [path]
    try:
        names = set(json.loads(index_path.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index_path}: not a sound index ({type(error).__name__})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index_path}: shard {shown(name)} must be a plain *.safetensors file name")
    paths = [model_dir / name for name in sorted(names)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        others = f" ({len(missing)} of {len(paths)} are missing)," if len(missing) > 1 else ","
        raise CheckpointError(f"{model_dir / missing[0]}: no such file{others} which {_INDEX} names")
    return paths
