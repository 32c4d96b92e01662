"""Small tokenizers, built in memory: byte-level BPE with a ChatML template, and one like SentencePiece."""

from __future__ import annotations

from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from mneme.replicas.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
BOS, IM_START, IM_END = range(3)
_TEXTS = [
    "the quick brown fox jumps over the lazy dog. " * 20,
    "Grüße, 世界! 🙂🙂 été naïve " * 20,
    "a STOP b END c " * 20,
]


@cache
def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TEXTS, trainer)
    backend.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    return backend


def tiny_tokenizer(template: str | None = CHATML, **kwargs: Any) -> Tokenizer:
    """Byte-level BPE; ids 0, 1, 2 are BOS, <|im_start|> and <|im_end|> (the end of a turn)."""
    return Tokenizer(byte_level_backend(), bos_token_id=BOS, eos_token_ids=(IM_END,), chat_template=template, **kwargs)


@cache
def sentencepiece_backend() -> tokenizers.Tokenizer:
    """Llama-2's arrangement: a space marker at word starts, bytes where the vocabulary has no character."""
    words = ["▁", "▁the", "▁fox", "fox", "▁a", "b", "c", ".", "é"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend
