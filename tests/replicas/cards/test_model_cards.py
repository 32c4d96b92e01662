"""What a checkpoint's files say is what is loaded: ids, templates, tensors, rotary frequencies, ends, how to sample."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mneme.replicas.card import sampling_defaults
from mneme.replicas.model.directory import load_model_config
from mneme.replicas.model.weights import load_weights
from mneme.replicas.text.tokenizer import Tokenizer
from mneme.replicas.text.tool_calls import FORMATS, Dialect
from tests.replicas.cards.model_cards import CARDS, TEXTS, write_card

pytestmark = pytest.mark.engine

SAID = (
    "",
    "Hello the fox",
    " two  blanks\n\n\tand don't 12345 x=1",
    "e\u0301te\u0301 Grüße 世界 🙂",
    "<s>a</s> <tool_call>{}</tool_call><|im_end|> [INST] hi [/INST]<think>\nno</think><|eot_id|>",
    "<｜begin▁of▁sentence｜><｜User｜>x<|begin_of_text|>y",
    *(text[-200:] for text in TEXTS),
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi there, Köln?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
    {"role": "user", "content": "  And you? "},
]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


class Loaded:
    """A card's directory, as this project and as `transformers` reads it."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.directory = name, directory
        self.tensors = write_card(name, directory)
        self.config = load_model_config(directory)
        self.tokenizer = Tokenizer.load(directory)
        self.their_config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        self.their_tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)


@pytest.fixture(scope="module", params=CARDS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = Loaded(request.param, tmp_path_factory.mktemp("card"))
    yield found
    found.tokenizer.close()


def test_texts_have_the_same_ids(loaded: Loaded) -> None:
    for text in SAID:
        ids = loaded.their_tokenizer(text)["input_ids"]
        assert loaded.tokenizer.encode(text) == ids, text
        bare = loaded.their_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert loaded.tokenizer.encode_rendered(text) == bare, text
        theirs = loaded.their_tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
        assert loaded.tokenizer.decode(ids) == theirs


def test_added_tokens_are_single_ids_and_special_as_the_files_say(loaded: Loaded) -> None:
    for token_id, token in loaded.their_tokenizer.added_tokens_decoder.items():
        assert loaded.tokenizer.encode_rendered(token.content)[-1:] == [token_id]
        assert (token_id in loaded.tokenizer.special_token_ids) == token.special, token
    assert len(loaded.tokenizer.encode_rendered("".join(CARDS[loaded.name].late))) == len(CARDS[loaded.name].late)
    assert loaded.tokenizer.bos_token_id == loaded.their_tokenizer.bos_token_id
    if CARDS[loaded.name].has_map:
        assert (loaded.tokenizer.bos_token_id, loaded.tokenizer.eos_token_ids) == (1, (2,))


def test_conversations_are_rendered_the_same(loaded: Loaded) -> None:
    theirs, card = loaded.their_tokenizer, CARDS[loaded.name]
    if not card.templates:
        assert not loaded.tokenizer.has_chat_template
        return
    if "chat_template.json" in card.templates:  # which only processors read
        theirs.chat_template = card.templates["chat_template.json"]
    for tools in ([], TOOLS):
        for asks in (True, False):
            expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=asks, tools=tools or None)
            variables = {"tools": tools} if tools else {}
            text = loaded.tokenizer.render_chat(CHAT, add_generation_prompt=asks, template_variables=variables)
            assert text == expected
            assert loaded.tokenizer.encode_rendered(text) == theirs(text, add_special_tokens=False)["input_ids"]
    if "Hermes" in loaded.name:  # the template without tools knows none
        assert "look_up" in text
        assert "look_up" not in loaded.tokenizer.render_chat(CHAT)
        assert Dialect(loaded.tokenizer).tool_format == FORMATS["hermes"]


def test_answers_end_and_are_sampled_as_the_files_say(loaded: Loaded) -> None:
    card, ids = CARDS[loaded.name], loaded.tokenizer.token_id
    expected = {loaded.their_tokenizer.eos_token_id, *map(ids, card.ends)}
    assert set(loaded.tokenizer.eos_token_ids) | set(loaded.config.eos_token_ids) == expected
    given = card.generation or {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {name: given[name] for name in names if name in given}
    if "max_new_tokens" in given:
        values["max_tokens"] = given["max_new_tokens"]
    assert sampling_defaults(loaded.directory, "auto") == values
    assert sampling_defaults(loaded.directory, "none") == {}


def test_the_shape_is_what_transformers_reads(loaded: Loaded) -> None:
    ours, theirs = loaded.config, loaded.their_config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    assert (ours.family, ours.dtype) == (theirs.model_type, str(theirs.dtype).removeprefix("torch."))
    assert ours.max_context == theirs.max_position_embeddings
    assert ours.tied_embeddings == bool(theirs.tie_word_embeddings)
    rotary = model.model.rotary_emb
    assert torch.allclose(torch.tensor(ours.rope.inv_freq), rotary.inv_freq, rtol=1e-6)
    assert ours.rope.attention_factor == pytest.approx(rotary.attention_scaling)
    assert ours.windows == tuple(getattr(theirs, "sliding_window", None) for _ in range(ours.num_layers))


def test_every_tensor_is_the_files(loaded: Loaded) -> None:
    config, tensors = loaded.config, {name: tensor.float() for name, tensor in loaded.tensors.items()}
    weights = load_weights(loaded.directory, config, torch.device("cpu"), torch.float32)
    left = set(tensors)

    def same(found: torch.Tensor | None, *names: str) -> None:
        assert found is not None
        assert torch.equal(found, torch.cat([tensors[name] for name in names])), names
        left.difference_update(names)

    def same_linear(linear: Any, *stems: str) -> None:
        rows = torch.eye(tensors[f"{stems[0]}.weight"].shape[1])
        biases = [f"{stem}.bias" for stem in stems if f"{stem}.bias" in tensors]
        expected = torch.cat([tensors[f"{stem}.weight"] for stem in stems]).T.clone()
        if biases:
            expected += torch.cat([tensors[name] for name in biases])
        assert torch.allclose(linear(rows), expected, rtol=0, atol=1e-6), stems
        left.difference_update(biases, (f"{stem}.weight" for stem in stems))

    embedding, head = "model.embed_tokens", "model.embed_tokens" if config.tied_embeddings else "lm_head"
    same(weights.embed(torch.arange(config.vocab_size)), f"{embedding}.weight")
    same_linear(weights.head, head)
    same(weights.norm.weight, "model.norm.weight")
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        same(layer.attention_norm.weight, f"{prefix}.input_layernorm.weight")
        same(layer.mlp_norm.weight, f"{prefix}.post_attention_layernorm.weight")
        same_linear(layer.attention.qkv, *(f"{prefix}.self_attn.{name}_proj" for name in "qkv"))
        same_linear(layer.attention.o, f"{prefix}.self_attn.o_proj")
        same_linear(layer.mlp.gate_up, f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj")
        same_linear(layer.mlp.down, f"{prefix}.mlp.down_proj")
        if config.qk_norm:
            same(layer.attention.q_norm.weight, f"{prefix}.self_attn.q_norm.weight")
            same(layer.attention.k_norm.weight, f"{prefix}.self_attn.k_norm.weight")
    assert not left
