"""The table of model families, by `model_type`."""

from __future__ import annotations

from mneme.replicas.model.families import falcon, gemma, gpt_oss, llama, mixtral, opt, phi3, qwen
from mneme.replicas.model.families.family import Family

FAMILIES: dict[str, Family] = {
    "falcon": falcon.FAMILY,
    "gemma2": gemma.GEMMA_2,
    "gemma3": gemma.GEMMA_3_WITH_VISION,
    "gemma3_text": gemma.GEMMA_3,
    "gpt_oss": gpt_oss.FAMILY,
    "llama": llama.LLAMA,
    "ministral": llama.MISTRAL,
    "mistral": llama.MISTRAL,
    "mixtral": mixtral.FAMILY,
    "opt": opt.FAMILY,
    "phi3": phi3.FAMILY,
    "qwen2": qwen.QWEN_2,
    "qwen2_moe": qwen.QWEN_2_MOE,
    "qwen3": qwen.QWEN_3,
    "qwen3_moe": qwen.QWEN_3_MOE,
}
