"""A Llama-layout transformer that trains fast on one CPU thread and exports to the Hugging Face layout.

Parameter names are those of `transformers.LlamaForCausalLM`, so `state_dict()` is the checkpoint.
Where the CPU has instructions for it, matrix products run in bfloat16 under autocast; weights, norms and the loss
stay in float32.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """Shape of the network, under the names of `transformers.LlamaConfig`."""

    vocab_size: int
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def as_hf(self, *, bos: int, eos: int, pad: int) -> dict[str, Any]:
        """The content of config.json."""
        fixed = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "dtype": "bfloat16",
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
        }
        return fixed | asdict(self)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_tables(config: TinyConfig) -> tuple[Tensor, Tensor]:
    """cos, sin  float32 [max_position_embeddings, head_dim]."""
    exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
    angles = torch.outer(torch.arange(config.max_position_embeddings), config.rope_theta**-exponents)
    doubled = torch.cat([angles, angles], dim=-1)
    return doubled.cos(), doubled.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [batch, heads, tokens, head_dim] by half-split RoPE, as Llama checkpoints expect."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.head_dim, self.group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.group, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class TinyLlama(nn.Module):
    """Decoder with tied embeddings; `hidden` gives final states, `logits` maps them to the vocabulary."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._init)
        for layer in self.model.layers:
            for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                nn.init.normal_(last.weight, std=0.02 / (2 * config.num_hidden_layers) ** 0.5)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """ids int64 [batch, tokens]; mask bool [tokens, tokens], True where a query sees a key."""
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        if torch.is_autocast_enabled("cpu"):
            cos, sin = cos.bfloat16(), sin.bfloat16()
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)
