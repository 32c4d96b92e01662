"""Thirteen checkpoints of the families that are served, as their cards publicly describe them, with tiny weights.

What matters to who loads them is as published: which files there are and in which spelling, kinds of tokenizers, names
and places of special tokens, where chat templates stand, rotary scaling, ends of answers, and how to sample. Sizes are
small, vocabularies are trained here, templates are in words of our own (`family_templates.py`).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.replicas.text.family_templates import LLAMA_3, MISTRAL_V3, QWEN_2_5, QWEN_3

TEXTS = (
    "the quick brown fox jumps over the lazy dog. " * 20,
    "Grüße aus Köln, 世界! 🙂 été naïve don't I'LL 1234567 3.14\n\n  x = f(a, b)\t# no\r\n" * 20,
)
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_R1 = (  # the answer begins within the reasoning; what an earlier answer thought is left out
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<｜User｜>' + message['content'] }}{% elif message['role'] == 'assistant' %}"
    "{{ '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% else %}"
    "{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)
_INST = (  # Llama 2: the system prompt stands in the first user's turn
    "{% if messages[0]['role'] == 'system' %}"
    "{% set said = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set said = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (said if loop.first else '') + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
_MISTRAL_7 = (
    "{{- bos_token }}{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}{%- elif message['role'] == 'user' %}"
    "{{- '[INST]' + message['content'] + '[/INST]' }}{%- else %}{{- message['content'] + eos_token }}{%- endif %}"
    "{%- endfor %}"
)
_HERMES_TOOLS = (
    "{{ bos_token }}<|im_start|>system\nCalls are written as <tool_call>{...}</tool_call>, of:"
    "{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>\n" + _CHATML
)

# How families split text before it is merged: words with a mark before them, digits by three or one by one.
_LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_WORDS = _LLAMA_3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")

_LLAMA_3_TOKENS = (
    "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|>"
)
_QWEN_TOKENS = "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|fim_prefix|> <tool_call> </tool_call>"
_R1_TOKENS = "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <think> </think>"
_PLAIN_TOKENS = {"<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"}
_BOS = {"llama-3": "<|begin_of_text|>", "pieces": "<s>", "tekken": "<s>"}  # of texts, by the kind of vocabulary
_BOS |= dict.fromkeys(("llama-3-r1", "qwen-r1"), "<｜begin▁of▁sentence｜>")
_MISTRAL_TOKENS = "[INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]"


class Card(NamedTuple):
    """One checkpoint's files."""

    vocabulary: str  # a kind of `make_vocabulary`
    tokens: str  # that are added to it: behind it, or before it where it is a SentencePiece one
    config: dict[str, Any]  # of config.json, besides sizes
    tokenizer: dict[str, Any]  # of tokenizer_config.json
    ends: tuple[str, ...]  # tokens that end an answer
    templates: dict[str, Any]  # by the file that they stand in
    generation: dict[str, Any] | None  # of generation_config.json; None: there is no such file
    in_config: bool = False  # its ends stand in config.json as well
    num_shards: int = 1
    has_map: bool = (
        False  # names of special tokens stand in special_tokens_map.json alone, as they did before 2023's end
    )
    late: tuple[str, ...] = ()  # tokens that only tokenizer_config.json has, as who tunes a model may add them


def _llama_3(factor: float, **more: Any) -> dict[str, Any]:
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    scaling |= {"original_max_position_embeddings": 8192}
    own = {"model_type": "llama", "rope_theta": 500_000.0, "rope_scaling": scaling, "max_position_embeddings": 131_072}
    return {**own, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5, "attention_bias": False, **more}


def _qwen(family: str, **more: Any) -> dict[str, Any]:
    own = {"model_type": family, "rope_theta": 1e6, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6}
    window = {"use_sliding_window": False, "sliding_window": 131_072, "max_window_layers": 28}
    return {**own, **window, "torch_dtype": "bfloat16", **more}


def _mistral(**more: Any) -> dict[str, Any]:
    own = {"model_type": "mistral", "rope_theta": 1e6, "max_position_embeddings": 32_768, "sliding_window": None}
    return {**own, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5, **more}


_FAST, _QWEN, _LLAMA = (
    {"tokenizer_class": f"{name}"} for name in ("PreTrainedTokenizerFast", "Qwen2Tokenizer", "LlamaTokenizer")
)
_LLAMA_3_NAMES = {
    **_FAST,
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|eot_id|>",
    "clean_up_tokenization_spaces": True,
}
_LLAMA_3_ENDS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
_LLAMA_3_SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
_QWEN_NAMES = {
    **_QWEN, "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None,
    "add_bos_token": False, "add_prefix_space": False, "errors": "replace", "split_special_tokens": False,
    "clean_up_tokenization_spaces": False,
}  # fmt: skip
_QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
_QWEN_3_SAMPLING = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
_PIECES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False}
_LLAMA_NAMES = {**_LLAMA, **_PIECES, "legacy": False, "add_bos_token": True, "add_eos_token": False}
_IN_CONFIG, _IN_FILE = "tokenizer_config.json", "chat_template.jinja"


def _token(text: str) -> dict[str, Any]:
    """Write a token as older files do: an object."""
    marks = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": text, **marks}


_R1_NAMES = {
    "tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": False, "legacy": True,
    "bos_token": _token("<｜begin▁of▁sentence｜>"), "eos_token": _token("<｜end▁of▁sentence｜>"),
    "pad_token": _token("<｜end▁of▁sentence｜>"), "unk_token": None, "clean_up_tokenization_spaces": False,
}  # fmt: skip
_R1_END = ("<｜end▁of▁sentence｜>",)
_R1_SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.95}

CARDS: dict[str, Card] = {
    "Llama-3.1-8B-Instruct": Card(
        *("llama-3", _LLAMA_3_TOKENS, _llama_3(8.0), _LLAMA_3_NAMES, _LLAMA_3_ENDS),
        *({_IN_CONFIG: LLAMA_3}, _LLAMA_3_SAMPLING, True, 3),
    ),
    "Llama-3.1-8B, saved by transformers 5": Card(
        "llama-3",
        _LLAMA_3_TOKENS,
        {
            "model_type": "llama", "dtype": "bfloat16", "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
            "rope_parameters": {**_llama_3(8.0)["rope_scaling"], "rope_theta": 500_000.0},
        },
        {**_LLAMA_3_NAMES, "tokenizer_class": "TokenizersBackend", "backend": "tokenizers"},
        ("<|end_of_text|>",),
        {},
        _LLAMA_3_SAMPLING,
    ),
    "Hermes-3-Llama-3.1-8B": Card(
        *("llama-3", f"{_LLAMA_3_TOKENS} <|im_start|> <|im_end|> <tool_call> </tool_call>", _llama_3(8.0)),
        *({**_LLAMA_3_NAMES, "eos_token": "<|im_end|>"}, ("<|im_end|>",)),
        {_IN_CONFIG: [{"name": "default", "template": _CHATML}, {"name": "tool_use", "template": _HERMES_TOOLS}]},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    ),
    "Hermes-3, with files of templates": Card(
        *("llama-3", f"{_LLAMA_3_TOKENS} <|im_start|> <|im_end|> <tool_call> </tool_call>", _llama_3(8.0)),
        *({**_LLAMA_3_NAMES, "eos_token": "<|im_end|>"}, ("<|im_end|>",)),
        {_IN_FILE: "{{ bos_token }}" + _CHATML, "additional_chat_templates/tool_use.jinja": _HERMES_TOOLS},
        None,
        in_config=True,
        late=("<|late|>", "<|later|>"),
    ),
    "Llama-2-7b-chat-hf": Card(
        *("pieces", "", {"model_type": "llama", "max_position_embeddings": 4096, "torch_dtype": "float16"}),
        *(_LLAMA_NAMES, ("</s>",), {_IN_CONFIG: _INST}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}, True, 2),
    ),
    "vicuna-7b-v1.5-16k": Card(
        "pieces",
        "",
        {
            "model_type": "llama", "max_position_embeddings": 4096, "torch_dtype": "float16",
            "rope_scaling": {"factor": 4.0, "type": "linear"},
        },
        {**_LLAMA_NAMES, "legacy": True},
        ("</s>",),
        {},
        {"temperature": 0.9, "top_p": 0.6, "max_length": 4096},
        has_map=True,
    ),
    "SmolLM2-1.7B-Instruct": Card(
        "digits",
        "<|endoftext|> <|im_start|> <|im_end|> <repo_name>",
        {
            "model_type": "llama", "rope_theta": 130_000, "max_position_embeddings": 8192, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "rope_interleaved": False,
        },
        {
            "tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        },
        ("<|im_end|>",),
        {_IN_CONFIG: _CHATML},
        {"transformers_version": "4.42.3"},
        in_config=True,
    ),
    "DeepSeek-R1-Distill-Qwen-7B": Card(
        *("qwen-r1", _R1_TOKENS, _qwen("qwen2", rope_theta=10_000, use_mrope=False), _R1_NAMES, _R1_END),
        *({_IN_CONFIG: _R1}, _R1_SAMPLING, True, 2),
    ),
    "Qwen2.5-7B-Instruct": Card(
        *("qwen", _QWEN_TOKENS, _qwen("qwen2"), _QWEN_NAMES, _QWEN_ENDS, {_IN_CONFIG: QWEN_2_5}),
        *({"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}, False, 4),
    ),
    "Qwen3-8B, 131k by YaRN": Card(
        "qwen",
        f"{_QWEN_TOKENS} <think> </think>",
        _qwen(
            "qwen3",
            head_dim=32,
            max_position_embeddings=131_072,
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
        ),
        _QWEN_NAMES,
        _QWEN_ENDS,
        {_IN_FILE: QWEN_3},
        _QWEN_3_SAMPLING,
    ),
    "Mistral-7B-Instruct-v0.1": Card(
        *("pieces", "", _mistral(rope_theta=10_000.0, sliding_window=4096), {**_LLAMA_NAMES, "legacy": True}),
        *(("</s>",), {_IN_CONFIG: _INST}, {"transformers_version": "4.34.0"}, True, 2),
    ),
    "Mistral-Nemo-Instruct-2407": Card(
        *("tekken", f"<unk> <s> </s> {_MISTRAL_TOKENS}", _mistral(head_dim=24, max_position_embeddings=131_072)),
        *({**_PIECES, "tokenizer_class": "GPT2Tokenizer"}, ("</s>",), {_IN_CONFIG: MISTRAL_V3}, {}, True, 2),
    ),
    "Mistral-Small-24B-Instruct-2501": Card(
        *("tekken", f"<unk> <s> </s> {_MISTRAL_TOKENS} [SYSTEM_PROMPT] [/SYSTEM_PROMPT]"),
        *(_mistral(rope_theta=1e8, head_dim=32), {**_LLAMA, **_PIECES, "legacy": True, "add_bos_token": True}),
        *(("</s>",), {"chat_template.json": _MISTRAL_7}, {"do_sample": True, "temperature": 0.15}, True, 2),
    ),
}  # fmt: skip


@cache
def make_vocabulary(kind: str) -> str:
    """Train one, as the text of a tokenizer.json without added tokens."""
    if kind == "pieces":
        return _pieces()
    words = _LLAMA_3_WORDS if kind.startswith(("llama-3", "tekken")) else _QWEN_WORDS
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=kind.startswith(("llama-3", "tekken"))))
    if kind.startswith("qwen"):
        backend.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "digits")
    split = pre_tokenizers.Split(Regex(words), "isolated")
    first = pre_tokenizers.Digits(individual_digits=True) if kind == "digits" else split
    backend.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return str(backend.to_str())


def _pieces() -> str:
    """A SentencePiece vocabulary: first the three control tokens, then bytes, then pieces and their merges."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    trained.train_from_iterator(
        [text[:600] for text in TEXTS], trainers.BpeTrainer(vocab_size=200, show_progress=False, max_token_length=8)
    )
    state = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *state["vocab"]]
    vocabulary = {piece: token_id for token_id, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(merge) for merge in state["merges"]]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return str(backend.to_str())


def _backend(card: Card) -> tokenizers.Tokenizer:
    """The whole tokenizer: added tokens, of which some are no special ones, and the BOS before texts."""
    backend = tokenizers.Tokenizer.from_str(make_vocabulary(card.vocabulary))
    names = [*(["<unk>", "<s>", "</s>"] if card.vocabulary == "pieces" else []), *card.tokens.split()]
    for name in names:
        plain = name in _PLAIN_TOKENS
        backend.add_tokens([tokenizers.AddedToken(name, special=not plain, normalized=False)])
    first = None if card.tokenizer.get("add_bos_token") is False else _BOS.get(card.vocabulary)
    if first is not None:
        backend.post_processor = processors.TemplateProcessing(
            f"{first} $A", f"{first} $A {first}:1 $B:1", special_tokens=[(first, backend.token_to_id(first))]
        )
    return backend


def write_card(name: str, directory: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint's directory; returns the tensors that are in its files."""
    card = CARDS[name]
    backend = _backend(card)
    backend.save(str(directory / "tokenizer.json"))
    ids = [backend.token_to_id(end) for end in card.ends]
    ends = {"eos_token_id": ids if len(ids) > 1 else ids[0]}
    decoder = {
        str(token_id): {"content": token.content, "lstrip": False, "normalized": False, "rstrip": False,
                        "single_word": False, "special": token.special}
        for token_id, token in backend.get_added_tokens_decoder().items()
    }  # fmt: skip
    for token_id, text in enumerate(card.late, backend.get_vocab_size()):
        decoder[str(token_id)] = {**_token(text), "normalized": False, "special": True}
    said = {**card.tokenizer, "added_tokens_decoder": decoder}
    if card.has_map:
        del said["added_tokens_decoder"]
        tokens = ("bos_token", "eos_token", "unk_token")
        _write(directory / "special_tokens_map.json", {name: _token(said.pop(name)) for name in tokens})
    if _IN_CONFIG in card.templates:
        said["chat_template"] = card.templates[_IN_CONFIG]
    _write(directory / _IN_CONFIG, said)
    for file, template in card.templates.items():
        if file.endswith(".jinja"):
            (directory / file).parent.mkdir(exist_ok=True)
            (directory / file).write_text(template)
        elif file != _IN_CONFIG:
            _write(directory / file, {"chat_template": template})
    if card.generation is not None:
        _write(directory / "generation_config.json", {"_from_model_config": True, **card.generation, **ends})
    sizes = {
        "vocab_size": backend.get_vocab_size() + 3,  # as most are: rounded up
        "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "hidden_act": "silu", "use_cache": True, "attention_dropout": 0.0,
    }  # fmt: skip
    _write(directory / "config.json", {**sizes, **card.config, **(ends if card.in_config else {})})
    return _write_weights(directory, card)


def _write_weights(directory: Path, card: Card) -> dict[str, torch.Tensor]:
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    torch.manual_seed(7)
    dtype = getattr(torch, card.config.get("torch_dtype") or card.config["dtype"])
    model = transformers.AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if card.config.get("tie_word_embeddings") else set()
    tensors = {
        name: torch.randn(tensor.shape).to(dtype) for name, tensor in model.state_dict().items() if name not in tied
    }
    names = sorted(tensors)
    if card.num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return tensors
    file_by_name: dict[str, str] = {}
    for index in range(card.num_shards):
        file = f"model-{index + 1:05}-of-{card.num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[index :: card.num_shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        file_by_name |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    _write(directory / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": file_by_name})
    return tensors


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False))
