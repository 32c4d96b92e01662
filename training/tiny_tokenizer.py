"""Byte-level BPE for the tiny model: any text round-trips, and the task words are single tokens.

The chat template writes the BOS token itself, as Llama 3's does; the tokenizer's post-processor adds it to
raw prompts. So a rendered chat is tokenized with `add_special_tokens=False`, everything else without it.
"""

import random
from pathlib import Path

from tiny_chats import make_chat
from tiny_words import line_starts, words
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mneme.lab.quality.coreference import make_case

BOS, PAD, IM_START, IM_END = "<|bos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 3072
CONTEXT_TOKENS = 2048
# As Qwen 2.5 has it, tools too, in fewer words; the model was not trained to call any.
CHAT_TEMPLATE = r"""{{ bos_token }}
{%- if tools %}
{{- '<|im_start|>system\n' + (messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '') }}
{{- 'You may call functions:\n<tools>' }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}
{{- '\n</tools>\n<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call> calls one.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message['role'] == 'system') %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] }}
{%- for call in message['tool_calls'] or [] %}
{{- '\n' if message['content'] or not loop.first }}
{{- '<tool_call>\n{"name": ' + call['function']['name'] | tojson }}
{{- ', "arguments": ' + call['function']['arguments'] | tojson + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def task_texts(seed: int) -> list[str]:
    """Generated text, and each task word so often that BPE merges it whole."""
    rng = random.Random(seed)
    texts = ["".join(make_case(rng, num_chunks=4, num_sentences=8, scene_share=0.2).chunks) for _ in range(500)]
    texts += ["\n".join(message["content"] for message in make_chat(rng)) for _ in range(2000)]
    texts += [f" {word}" * 5000 for word in words()]
    return texts + [f"\n{word}" * 5000 for word in line_starts()]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A tokenizer of VOCAB_SIZE tokens; the four special ones come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    check_single_tokens(tokenizer)
    return tokenizer


def check_single_tokens(tokenizer: Tokenizer) -> None:
    """Raise ValueError if a task word is split: the tasks ask for one-token answers."""
    texts = [f" {word}" for word in words()] + line_starts()
    split = [text for text in texts if len(tokenizer.encode(text, add_special_tokens=False)) != 1]
    if split:
        raise ValueError(f"not single tokens: {split}")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=IM_END,
        pad_token=PAD,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_TOKENS,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def render(messages: list[dict[str, str]], *, generate: bool) -> str:
    """What the chat template writes, without Jinja."""
    text = "".join(f"{IM_START}{message['role']}\n{message['content']}{IM_END}\n" for message in messages)
    return BOS + text + (f"{IM_START}assistant\n" if generate else "")
