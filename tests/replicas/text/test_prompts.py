"""What is rendered for an appended turn, with templates that do odd things to a history; what conversations share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mneme.errors import InvalidRequest
from mneme.replicas.text.prompts import conversation_prefix, render_appended, takes_notes
from tests.replicas.text.family_templates import LLAMA_3, MISTRAL_V3, QWEN_2_5, QWEN_3
from tests.replicas.tiny_tokenizer import CHATML, tiny_tokenizer

DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}" + CHATML
)
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|bos|>[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' <|im_end|>' }}{% endif %}{% endfor %}"
)
WITHOUT_THOUGHTS = (  # all answers but the last lose what comes before the marker
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SHOUTING = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
LAST_OPEN = (  # the last message is not closed
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{{ '' if loop.last else ';' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ';assistant:' }}{% endif %}"
)
SYSTEM_FIRST = (  # all that the system says stands at the head
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'] + ':' + m['content'] }}{% endif %}{% endfor %}"
)
TOKENIZER = tiny_tokenizer()
HISTORY = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "a dog"}]
NEW = [{"role": "user", "content": "and then?"}]


def appended(template: str, messages: Sequence[Mapping[str, Any]] = NEW) -> tuple[str, int, str]:
    """The text, the size of what closes the answer, and what the whole conversation would have there."""
    tokenizer = tiny_tokenizer(template)
    try:
        text, num_closing_chars = render_appended(tokenizer.render_chat, messages)
        return text, num_closing_chars, tokenizer.render_chat([*HISTORY, *messages]).partition("a dog")[2]
    finally:
        tokenizer.close()


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, LLAMA_2, WITHOUT_THOUGHTS, LAST_OPEN])
def test_it_is_what_the_whole_conversation_has_behind_the_answer(template: str) -> None:
    text, _, whole = appended(template)
    assert text == whole


@pytest.mark.parametrize(
    ("template", "closing"),
    [(CHATML, "<|im_end|>\n"), (DEFAULT_SYSTEM, "<|im_end|>\n"), (LLAMA_2, " <|im_end|>"), (LAST_OPEN, "")],
)
def test_what_closes_an_answer_is_known(template: str, closing: str) -> None:
    text, num_closing_chars, _ = appended(template)
    assert text[:num_closing_chars] == closing


def test_a_template_that_rewrites_answers_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot go on behind an answer"):
        appended(SHOUTING)


@pytest.mark.parametrize("first_words", ["the fox", "\n\nthe", " 1 2 3", "世界", "<|im_end|>", "🙂", "", "\tx", "_"])
def test_a_conversation_shares_its_beginning_to_the_token_whatever_is_said(first_words: str) -> None:
    beginning = [{"role": "system", "content": "be brief, and never name the fox"}]
    prefix = conversation_prefix(TOKENIZER.render_chat, TOKENIZER.encode_rendered, beginning)
    whole = [*beginning, {"role": "user", "content": first_words}]
    ids = TOKENIZER.encode_rendered(TOKENIZER.render_chat(whole))
    assert ids[: len(prefix)] == prefix
    assert len(prefix) >= len(TOKENIZER.encode_rendered(f"<|im_start|>system\n{beginning[0]['content']}<|im_end|>\n"))


def test_behind_a_user_the_answer_is_what_comes_next() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a document"}]
    prefix = conversation_prefix(TOKENIZER.render_chat, TOKENIZER.encode_rendered, messages)
    assert prefix == TOKENIZER.encode_rendered(TOKENIZER.render_chat(messages))


def test_a_template_that_puts_the_user_first_has_no_common_beginning() -> None:
    template = "{% for message in messages | reverse %}{{ message['content'] }}{% endfor %}"
    turned = tiny_tokenizer(template)
    with pytest.raises(InvalidRequest, match="puts what follows before them"):
        conversation_prefix(turned.render_chat, turned.encode_rendered, [{"role": "system", "content": "s"}])


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        *((CHATML, True), (QWEN_2_5, True), (QWEN_3, True), (LLAMA_3, True)),
        *((MISTRAL_V3, False), (LLAMA_2, False), (SYSTEM_FIRST, False), (SHOUTING, False)),
    ],
)
def test_which_templates_have_a_place_for_a_system_message_in_the_middle(template: str, takes: bool) -> None:
    assert takes_notes(tiny_tokenizer(template).render_chat) is takes
