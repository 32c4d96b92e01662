"""Calls written back by the templates of four families are found again by their parsers, results and reasoning stand
where the families put them, and what a grammar forces is what the template writes.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
import tokenizers

from mneme.replicas.text.calls.answer_parser import whole_calls
from mneme.replicas.text.calls.dialects import FORMATS
from mneme.replicas.text.matcher import Grammars
from mneme.replicas.text.tokenizer import Tokenizer
from mneme.replicas.text.tool_calls import Dialect
from tests.replicas.text.family_templates import LLAMA_3, MISTRAL_V3, QWEN_2_5, QWEN_3
from tests.replicas.tiny_tokenizer import IM_END, byte_level_backend

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": CITY}}
    for name in ("weather", "rain")
]
QUESTION = {"role": "user", "content": "Köln?"}
ARGUMENTS: dict[str, Any] = {"city": 'Kö"ln</x>', "days": 3}


class Family(NamedTuple):
    template: str
    parser: str
    marks: tuple[str, ...]  # tokens of the vocabulary
    end: str  # of an assistant's turn
    result: str  # what the template writes of "wet"
    max_calls: int = 2


FAMILIES = {
    "qwen-2.5": Family(
        QWEN_2_5, "hermes", ("<tool_call>", "</tool_call>"), "<|im_end|>", "<tool_response>\nwet\n</tool_response>"
    ),
    "qwen-3": Family(
        QWEN_3, "hermes", ("<tool_call>", "</tool_call>"), "<|im_end|>", "<tool_response>\nwet\n</tool_response>"
    ),
    "llama-3": Family(
        LLAMA_3, "llama3_json", ("<|python_tag|>", "<|eot_id|>"), "<|eot_id|>", 'ipython<|end_header_id|>\n\n"wet"', 1
    ),
    "mistral-v3": Family(
        MISTRAL_V3, "mistral", ("[TOOL_CALLS]", "</s>"), "</s>", '{"content": "wet", "call_id": "abcdefgh0"}'
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def tokenizer_of(family: Family) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_level_backend().to_str())  # its own, as tokens are added
    backend.add_special_tokens(list(family.marks))
    return Tokenizer(backend, eos_token_ids=(IM_END,), chat_template=family.template)


def said_with_calls(num_calls: int, **more: Any) -> dict[str, Any]:
    calls = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": ARGUMENTS}}
        for i, name in enumerate(("weather", "rain")[:num_calls])
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def render(tokenizer: Tokenizer, *messages: dict[str, Any], asks: bool = True) -> str:
    return tokenizer.render_chat(messages, add_generation_prompt=asks, template_variables={"tools": TOOLS})


def test_calls_that_a_template_writes_are_found_again(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    dialect = Dialect(tokenizer)
    assert dialect.tool_format == FORMATS[family.parser]
    for num_calls in range(1, family.max_calls + 1):
        asked = render(tokenizer, QUESTION)
        told = render(tokenizer, QUESTION, said_with_calls(num_calls), asks=False)
        assert told.startswith(asked)  # so a session goes on from what was drawn
        written = told.removeprefix(asked).strip().removesuffix(family.end)
        for size in (1, 7, len(written)):
            parser = dialect.parser({"weather", "rain"})
            pieces = [written[i : i + size] for i in range(0, len(written), size)]
            spoken = [parser.push(piece, is_last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
            calls = whole_calls(piece for each in spoken for piece in each.calls)
            assert [call.name for call in calls] == ["weather", "rain"][:num_calls]
            assert all(json.loads(call.arguments) == ARGUMENTS for call in calls)
            assert not "".join(each.content for each in spoken).strip()


def test_every_tool_is_told_and_every_result_stands_where_it_belongs(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    result = {"role": "tool", "content": "wet", "tool_call_id": "abcdefgh0"}
    told = render(tokenizer, QUESTION, said_with_calls(1), result)
    assert all(f'"{name}"' in told for name in ("weather", "rain", "city", "days"))
    assert told.index("weather") < told.index(family.result)


def test_what_a_template_writes_is_inside_the_grammar_of_forced_calls(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    grammar = Dialect(tokenizer).call_grammar({"weather": CITY, "rain": CITY}, is_forced=True, is_one=True)
    assert grammar is not None
    written = render(tokenizer, QUESTION, said_with_calls(1), asks=False).removeprefix(render(tokenizer, QUESTION))
    if family.parser == "mistral":  # the id is not forced
        written = written.replace(', "id": "abcdefgh0"', "")
    matcher = Grammars(tokenizer).matcher(grammar, [])
    for token_id in tokenizer.encode_rendered(written.strip().removesuffix(family.end)):
        if not matcher.is_over:
            mask = matcher.mask(())
            assert mask[token_id >> 5] >> (token_id & 31) & 1, tokenizer.token_text(token_id)
            matcher.push(token_id)
    assert matcher.error is None


def test_qwen_3_writes_reasoning_back_within_a_round_of_calls_alone() -> None:
    tokenizer = tokenizer_of(FAMILIES["qwen-3"])
    assert Dialect(tokenizer).reasoning is not None
    thinking = said_with_calls(1, reasoning_content="Hm, Rhine.")
    result = {"role": "tool", "content": "wet", "tool_call_id": "abcdefgh0"}
    within = render(tokenizer, QUESTION, thinking, result)
    assert "<think>\nHm, Rhine.\n</think>" in within
    behind = render(tokenizer, QUESTION, thinking, result, {"role": "assistant", "content": "Wet."}, QUESTION)
    assert "Rhine" not in behind
