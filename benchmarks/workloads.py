"""The workloads that engine benchmarks and peers share, and the random model they run on.

| name | requests | shared tokens | private tokens | new tokens |
|------|----------|---------------|----------------|------------|
| W    | 8        | 512           | 32             | 32         |
| S    | 32       | 2,048         | 64             | 64         |
| P    | 32       | 0             | 2,112          | 64         |

Greedy, end-of-text ignored. The model: a random Llama of 31M parameters, hidden 512, intermediate
1,376, 8 layers, 8 query and 4 key/value heads, vocabulary 8,192, untied embeddings.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

VOCAB_SIZE = 8192
MODEL_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


class Workload(NamedTuple):
    num_requests: int
    num_shared: int
    num_private: int
    num_new: int

    @property
    def output_tokens(self) -> int:
        return self.num_requests * self.num_new


WORKLOADS = {
    "W": Workload(8, 512, 32, 32),
    "S": Workload(32, 2048, 64, 64),
    "P": Workload(32, 0, 2112, 64),
    "L": Workload(8, 0, 4096, 64),
}


def make_prompts(workload: Workload, seed: int = 1) -> list[list[int]]:
    """Token ids of each request; ids under 16 are left out, as peers give some of them a meaning."""
    generator = random.Random(seed)

    def draw(count: int) -> list[int]:
        return [generator.randrange(16, VOCAB_SIZE) for _ in range(count)]

    shared = draw(workload.num_shared)
    return [shared + draw(workload.num_private) for _ in range(workload.num_requests)]


def write_random_llama(directory: Path, seed: int = 0, **shape: Any) -> Path:
    """Save the 31M-parameter model in torch's default dtype, once; `shape` goes before `MODEL_SHAPE`."""
    if not (directory / "model.safetensors").exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**{**MODEL_SHAPE, **shape})).save_pretrained(directory)
    return directory


def write_chat_llama(directory: Path, **shape: int) -> Path:
    """Save the same model, or one of another shape, with the tokenizer and the chat template of mneme-tiny."""
    from mneme.replicas.model.directory import model_directory

    write_random_llama(directory, **{"vocab_size": 3072, "eos_token_id": 3, **shape})
    for file in model_directory("mneme-tiny").iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(file, directory)
    return directory
