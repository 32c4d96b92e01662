"""Write a trained tiny model as a folder that `transformers` loads, and read one back."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_model import TinyConfig, TinyLlama
from tiny_tokenizer import BOS, IM_END, PAD, save_tokenizer
from tokenizers import Tokenizer


def export(model: TinyLlama, tokenizer: Tokenizer, folder: Path) -> None:
    """Weights as bfloat16, configuration, tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    bos, eos, pad = (tokenizer.token_to_id(token) for token in (BOS, IM_END, PAD))
    _write(folder / "config.json", model.config.as_hf(bos=bos, eos=eos, pad=pad))
    _write(
        folder / "generation_config.json",
        {
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "do_sample": False,
        },
    )
    save_tokenizer(tokenizer, folder)


def load(folder: Path) -> tuple[TinyLlama, Tokenizer]:
    """The model in float32, ready to be measured, and its tokenizer."""
    content = json.loads((folder / "config.json").read_text())
    names = TinyConfig.__dataclass_fields__
    model = TinyLlama(TinyConfig(**{name: value for name, value in content.items() if name in names}))
    model.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
