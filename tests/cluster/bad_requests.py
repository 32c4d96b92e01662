"""Malformed requests, as data: what to send, and the status and `param` that must come back.

`BAD_REQUESTS` go through an HTTP client, `RAW_REQUESTS` through a bare socket. Bodies are written for any
model: `$MODEL` stands for a served model's name, and sizes that depend on it are functions of `Target`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MIB = 2**20
CHAT, COMPLETION, RESPONSES, EMBEDDINGS = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "embeddings")
)
MESSAGES, SESSIONS = "/v1/messages", "/v1/sessions"
HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Target:
    """What a case needs to know about the server."""

    model: str
    max_context: int


@dataclass(frozen=True)
class BadRequest:
    """`param`: what is at fault; of Anthropic's errors, which name no field, words of the message."""

    param: str | None
    body: bytes | dict[str, Any] | list[Any] | str | Callable[[Target], dict[str, Any]] = b""
    path: str = CHAT
    status: int = 400
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        sent = "" if callable(self.body) else repr(self.body)[-60:]
        return f"{self.method} {self.path:.60} {self.param} {sent}"

    def encoded(self, target: Target) -> bytes:
        body = self.body(target) if callable(self.body) else self.body
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return raw.replace(b"$MODEL", target.model.encode())


@dataclass(frozen=True, kw_only=True)
class RawRequest:
    """`sent` goes out as it is; the answer has one of `statuses` (none: the server may just wait)."""

    name: str
    sent: bytes
    statuses: frozenset[int] = frozenset()
    is_ours: bool = False  # the answer comes from our code, not from the HTTP server: it has our error object

    def encoded(self, target: Target) -> bytes:
        sent = self.sent.replace(b"$MODEL", target.model.encode())
        return sent.replace(b"$LENGTH", b"%d" % len(sent.partition(b"\r\n\r\n")[2]))


# Of each API, a body that is right: cases change some of it.
RIGHT: dict[str, dict[str, Any]] = {
    CHAT: {"model": "$MODEL", "messages": HELLO, "max_tokens": 4},
    COMPLETION: {"model": "$MODEL", "prompt": "Hello", "max_tokens": 4},
    EMBEDDINGS: {"model": "$MODEL", "input": "Hello"},
    RESPONSES: {"model": "$MODEL", "input": "Hello", "max_output_tokens": 4, "store": False},
    MESSAGES: {"model": "$MODEL", "messages": HELLO, "max_tokens": 4},
}


def _chat(param: str | None, status: int = 400, **changes: Any) -> BadRequest:
    return BadRequest(param, {**RIGHT[CHAT], **changes}, status=status)


def _said(param: str, *parts: Any, role: str = "user") -> BadRequest:
    """A chat whose only message has these parts."""
    return _chat(f"messages[0].content{param}", messages=[{"role": role, "content": list(parts)}])


def _completion(param: str, status: int = 400, **changes: Any) -> BadRequest:
    return BadRequest(param, {**RIGHT[COMPLETION], **changes}, COMPLETION, status)


def _response(param: str, status: int = 400, **changes: Any) -> BadRequest:
    return BadRequest(param, {**RIGHT[RESPONSES], **changes}, RESPONSES, status)


def _message(words: str, status: int = 400, path: str = MESSAGES, **changes: Any) -> BadRequest:
    return BadRequest(words, {**RIGHT[MESSAGES], **changes}, path, status)


def _json(fields: str, param: str | None = None) -> BadRequest:
    """A chat that `json.dumps` would not write."""
    return BadRequest(param, json.dumps(RIGHT[CHAT])[:-1].encode() + b", " + fields.encode() + b"}")


def _at(path: str, param: str | None, status: int = 404, method: str = "GET", body: Any = b"") -> BadRequest:
    return BadRequest(param, body, path, status, method)


def _tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


# Values of one field, at which the field is named.
_VALUES: list[tuple[str, dict[str, list[Any]]]] = [
    (
        CHAT,
        {
            "messages": [None, [], "Hello", HELLO * 5000, [{"role": "user", "content": "a" * MIB}]],
            "model": [5],
            "timeout_s": [0, 86_401, 10**400, "60", True, [60]],
            "documents": ["a", ["a"] * 10_000],
            "max_tokens": [0, 2**63, 10**9, "5", 5.5, True],
            "max_completion_tokens": [0],
            "min_tokens": [5],
            "n": [0, 129],
            "temperature": [-1, 1e308, "hot", [1]],
            "top_p": [0, 2],
            "top_k": [-2, 1.5],
            "min_p": [1.5],
            "repetition_penalty": [0, 0.005, 10.5],
            "presence_penalty": [3],
            "frequency_penalty": [-3],
            "seed": [2**64, 0.5],
            "stop": [list("abcdefghijklmnopq"), ["x" * 205] * 5, [""], "é" * 129, 5],
            "stop_token_ids": [[-1], [10**8], list(range(65))],
            "allowed_token_ids": [[], [10**8]],
            "bad_words": ["word", [" "], ["a"] * 65],
            "continue_final_message": [True],
            "logit_bias": [{str(i): 1 for i in range(1025)}, {"100000000": 1}, {"word": 1}, [1]],
            "top_logprobs": [2],
            "logprobs": [1],
            "stream": ["yes"],
            "stream_options": [{"include_usage": True}],
            "session_id": ["", "a\nb", "x" * 257],
            "session": ["s"],
            "truncation": ["auto", []],
            "include_stop_str_in_output": ["yes"],
            "prompt_cache_key": [7],
            "cache_salt": ["", {}],
            "tool_choice": ["required"],
            "echo": [True],
            "guided_json": ["word", {"uniqueItems": True}],
            "guided_regex": ["a(?=b)", "a" * (1 << 18)],
            "guided_choice": [[]],
            "guided_grammar": ["start: other"],
            "modalities": [["text", "audio"]],
            "logits_processors": [["os.system"]],
            "chat_template_kwargs": [[1]],
            "chat_template": ["{% for a in range(9) %}{% endfor %}"],
            "reasoning_effort": ["hgih", 1],
            "priority": [1.5, True, 2**31],
            "service_tier": ["best", 1],
            "truncate_prompt_tokens": [0, -2, True, 1.5, "5"],
        },
    ),
    (
        COMPLETION,
        {
            "prompt": ["", [], None, {}, [-1], [10**9], [2**70], [5] * 10**6, ["a"] * 200],
            "timeout_s": [0],
            "best_of": [3],
            "suffix": ["x"],
            "prompt_logprobs": [-1, 21, "1"],
            "logprobs": [21],
        },
    ),
    (
        EMBEDDINGS,
        {
            "input": [None, "", [], {}, [-1], [2**70], "\ud800", ["a"] * 2049],
            "encoding_format": ["hex"],
            "dimensions": [0, "8"],
            "truncate_prompt_tokens": [0],
            "pooling": ["max"],
        },
    ),
    (
        RESPONSES,
        {
            "input": [None, [], 5, "\ud800", [{"type": "computer_call"}]],
            "instructions": [5],
            "max_output_tokens": [0],
            "temperature": [9],
            "top_p": [0],
            "top_logprobs": [21],
            "background": [True],
            "conversation": ["conv_1"],
            "prompt": [{"id": "pmpt_1"}],
            "metadata": [{str(i): "a" for i in range(17)}, {"a": "x" * 513}],
            "previous_response_id": ["", 5, "a\tb"],
            "tool_choice": ["required"],
            "truncation": ["best"],
            "service_tier": ["best"],
            "store": ["no"],
            "stream": ["yes"],
        },
    ),
]
_OF_VALUES = [
    BadRequest(name, {**RIGHT[path], name: value}, path)
    for path, values_by_name in _VALUES
    for name, values in values_by_name.items()
    for value in values
]

_JSON = [
    *(BadRequest(None, body) for body in (b"", b"{'model': 1}", b'{"model": "$MODEL", "messages": [{"ro')),
    *(BadRequest(None, body) for body in ([1, 2], "hello", b"null", b'{"model": "\xff\xfe"}')),
    BadRequest(None, json.dumps(RIGHT[CHAT]).encode("utf-16")),
    _json('"n": 1} '),  # one bracket too many
    _json('"n": 1, "n": 2', "n"),
    *(_json(f'"temperature": {number}') for number in ("NaN", "Infinity", "1e999")),
    _json('"seed": ' + "9" * 5000),
    _json('"metadata": ' + "[" * 100 + "]" * 100, "metadata" + "[0]" * 24),
    _json('"metadata": ' + "[" * 100_000 + "]" * 100_000, "body"),
    _json('"user": "\0"'),
    BadRequest("content-type", RIGHT[CHAT], headers={"content-type": "text/plain"}),
    BadRequest("content-encoding", gzip.compress(b" " * (20 * MIB), mtime=0), headers={"content-encoding": "gzip"}),
    BadRequest("body", b'"' + b" " * (9 * MIB) + b'"', status=413),
]

_PLACES = [
    _at("/v1/nowhere", None, method="POST", body=RIGHT[CHAT]),
    BadRequest(None, b"a=b", "/v1/nowhere", 404, headers={"content-type": "application/x-www-form-urlencoded"}),
    _at("/v1/models/..%2f..%2fetc%2fpasswd", "model"),
    _at("/v1/models/%00", "model"),
    *(_at(CHAT, None, 405, method) for method in ("GET", "DELETE", "PUT", "OPTIONS")),
    *(BadRequest("X-Session-ID", RIGHT[CHAT], headers={"X-Session-ID": name}) for name in ("x" * 257, "a\tb")),
    # Routes that take nothing: there is only the method to get wrong.
    *(
        _at(path, None, 405, "POST")
        for path in ("/v1/models", "/v1/kv/stats", "/v1/kv/pins", "/health", "/metrics", "/", "/docs", f"{SESSIONS}/s")
    ),
]

_CHAT = [
    BadRequest("messages", {"model": "$MODEL"}),
    _chat("messages[0]", messages=["Hello"]),
    _chat("messages[0].role", messages=[{"role": "wizard", "content": "Hello"}]),
    _chat("messages[0].role", messages=[{"content": "Hello"}]),
    *(_chat("messages[0].content", messages=[{"role": "user", "content": value}]) for value in (None, 5, "a\ud800b")),
    _said("[0]", ["Hello"]),
    _said("[0].type", {"type": "image_url", "image_url": {"url": "http://x"}}),
    _said("[0].refusal", {"type": "refusal", "text": "a"}, role="assistant"),
    _said("[0].text", {"type": "output_text", "text": None}, role="assistant"),
    _said("[0].type", {"text": "a"}, role="assistant"),
    _said("", {"type": "thinking", "thinking": "Hm."}),
    _said("[0].thinking", {"type": "thinking", "text": "Hm."}),
    _said("[0].name", {"type": "tool_reference"}),
    _said("[0].text", {"type": "document"}),
    _said("[0].text", {"type": "document", "text": ""}),
    _chat("metadata key", metadata={"\udc00": 1}),
    _chat(
        "messages[0].tool_calls[0].id",
        messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
    ),
    _chat(
        "messages[0].tool_calls",
        messages=[
            {"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]}
        ],
    ),
    _chat(
        "messages[0].tool_calls[0].type",
        messages=[
            {"role": "assistant", "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "f", "input": ""}}]}
        ],
    ),
    BadRequest("max_tokens", lambda t: RIGHT[CHAT] | {"max_tokens": t.max_context + 1}),
    BadRequest("max_completion_tokens", lambda t: RIGHT[CHAT] | {"max_completion_tokens": t.max_context + 1}),
    BadRequest("messages", lambda t: RIGHT[CHAT] | {"documents": ["the fox " * t.max_context]}),
    *(_chat("model", 404, model=name) for name in ("no-such-model", "../../etc/passwd", "")),
    *(_chat("documents[0]", documents=[value]) for value in ("", 5, None)),
    *(_chat("documents[0].text", documents=[value]) for value in ({}, {"text": ""})),
    _chat("documents[0].contents", documents=[{"contents": ["a"]}]),
    _chat("documents[0].title", documents=[{"text": "a", "title": 5}]),
    _chat("documents", documents=["a"], messages=[{"role": "system", "content": "a"}]),
    *(
        _chat(f"blend.{name}", documents=["a"], blend={name: value})
        for name, values in (
            *(("mode", ("best",)), ("selector", ("best",)), ("ratio", (-0.1, 1.1, True, "0.5"))),
            *(("min_tokens", (-1, True)), ("order", ("best", 1)), ("ordre", ("any",))),
        )
        for value in values
    ),
    _chat("blend", documents=["a"], blend="auto"),
    *(
        _chat("truncate_prompt_tokens", truncate_prompt_tokens=2, **other)
        for other in (
            {"truncation": {"strategy": "recompute"}},
            {"session": {"id": "s", "append": True}},
            {"documents": ["the quick brown fox"]},
        )
    ),
    _chat("allowed_token_ids", allowed_token_ids=[5], guided_regex="a"),
    _chat("continue_final_message", continue_final_message=True, add_generation_prompt=False),
    _chat("logit_bias[5]", logit_bias={"5": 1e9}),
    *(_chat("top_logprobs", logprobs=True, top_logprobs=number) for number in (21, -1)),
    _chat("stream_options", stream=True, stream_options=[]),
    _chat("guided_choice[0]", guided_choice=[1]),
    _chat("guided_regex", guided_regex="a", guided_choice=["a"]),
    _chat("structured_outputs.regex", structured_outputs={"regex": "(" * 3000}),
    _chat("structured_outputs.structural_tag", structured_outputs={"structural_tag": "{}"}),
    _chat("structured_outputs.xml", structured_outputs={"xml": "a"}),
    _chat("response_format.json_schema.schema", response_format={"type": "json_schema", "json_schema": {}}),
    _chat("response_format.json_schema", response_format={"type": "json_schema"}),
    _chat("response_format.type", response_format={"type": "xml"}),
    _chat("tool_choice.function.name", tools=[_tool()], tool_choice=_tool("g")),
    _chat("tool_choice", tools=[_tool()], tool_choice=7),
    _chat("tool_choice.type", tools=[_tool()], tool_choice={"type": "allowed_tools", "allowed_tools": {}}),
    _chat("tools[0].type", tools=[{"type": "custom", "custom": {"name": "f"}}]),
    _chat("tools[0].function.name", tools=[_tool("f f")]),
    *(_chat("tools", tools=tools) for tools in ([_tool(), _tool()], [_tool(f"f{i}") for i in range(129)])),
    _chat("tools", tools=[_tool(parameters={"const": "x" * MIB})], tool_choice="required"),
    *(
        _chat("tools[0].function.parameters", tools=[_tool(parameters=schema)], tool_choice="required")
        for schema in ({"$ref": "#/a"}, {"not": {}})
    ),
    _chat("response_format", tools=[_tool()], tool_choice="required", response_format={"type": "json_object"}),
]

_APPEND = {"id": "nobody", "append": True}
_SESSIONS = [
    *(
        _chat(f"truncation.{name}", session_id="s", truncation={name: value})
        for name, values in (
            *(("ratio", (0, 1.0, True, "half", None)), ("keep_first", (-1, 10**30, 1.5, True))),
            *(("strategy", ("auto", None)), ("keep", ("best",))),
        )
        for value in values
    ),
    BadRequest(
        "truncation.keep_first",
        lambda t: RIGHT[CHAT] | {"session_id": "s", "truncation": {"keep_first": t.max_context}},
    ),
    _chat("truncation.strategy", truncation={"strategy": "reuse_kv"}),
    *(_chat("session.id", session=session) for session in ({"id": 7}, {"id": ""}, {"id": "a\x7fb"}, {"ttl_s": 60})),
    _chat("session.append", session={"id": "s", "append": "yes"}),
    *(
        _chat("session.ttl_s", session={"id": "s", "ttl_s": value})
        for value in (0, -1, 0.999, 1e300, 10**30, "60", "NaN", True, [60])
    ),
    *(_json(f'"session": {{"id": "s", "ttl_s": {number}}}') for number in ("NaN", "-Infinity", "1e999")),
    *(_chat("session_id", 404, session=_APPEND, **more) for more in ({"stream": True}, {"n": 3}, {"cache_salt": "x"})),
    *(_completion("session_id", 404, session=_APPEND, prompt=prompt) for prompt in ("Hello", [5, 6])),
    _completion("prompt", prompt=["a", "b"], session=_APPEND),
    *(_at(f"{SESSIONS}/{name}", "session_id") for name in ("nobody", "%ff", "..%2f..%2fetc")),
    *(_at(f"{SESSIONS}/{name}", "session_id", 400) for name in ("", "%00", "x" * 257)),
    _at(f"{SESSIONS}/a%0Ab", None),
    _at(f"{SESSIONS}/s?cache_salt=", "cache_salt", 400),
    _at(f"{SESSIONS}/nobody", "session_id", method="DELETE"),
    _at(f"{SESSIONS}/nobody/fork", "session_id", method="POST", body={}),
    *(_at(f"{SESSIONS}/s/fork", "session_id", 400, "POST", {"session_id": name}) for name in (7, "", "a\tb")),
    *(_at(f"/v1/kv/explain/{name}", "request_id") for name in ("x", ".*")),
    *(_at(f"/v1/kv/explain/{name}", "request_id", 400) for name in ("", "x" * 200)),
    _at("/v1/kv/warm", "prompt", 400, "POST", {"model": "$MODEL"}),
    *(_at(f"/v1/kv/pins/{name}", "pin_id", method="DELETE") for name in ("nobody", "")),
]

_PROMPTS = [
    _at(COMPLETION, "prompt", 400, "POST", {"model": "$MODEL"}),
    *(_completion("prompt[1]", prompt=prompt) for prompt in (["a", ""], ["a", [1]], [1, "a"])),
    _completion("prompt[0][0]", prompt=[[[1]]]),
    *(_completion("prompt[0]", prompt=[value]) for value in (True, 1.0)),
    _completion("prompt[0].type", prompt=[{"type": "image", "text": "a"}]),
    _completion("prompt[0].text", prompt=[{"type": "document", "text": ""}]),
    _completion("prompt", prompt=["a"] * 65, n=2),
    *(_completion("documents", prompt=prompt, documents=["a"]) for prompt in (["a", "b"], [5, 6])),
    _completion("prompt_logprobs", prompt_logprobs=1, session_id="s"),
    _completion("prompt_logprobs", prompt_logprobs=0, stream=True),
    *(
        _completion("echo", echo=True, logprobs=1, **more)
        for more in ({"session_id": "s"}, {"documents": ["Hello"]}, {"truncation": {"strategy": "recompute"}})
    ),
    _completion("max_tokens", max_tokens=0, prompt_logprobs=1),
    *(
        BadRequest(param, lambda t, more=more: RIGHT[COMPLETION] | more(t), COMPLETION)  # type: ignore[misc]
        for param, more in (
            ("prompt", lambda t: {"prompt": [5] * t.max_context, "max_tokens": 1}),
            ("max_tokens", lambda t: {"prompt": [5] * (t.max_context - 4), "max_tokens": 5, "min_tokens": 5}),
            ("prompt[1]", lambda t: {"prompt": ["a", "the fox " * t.max_context]}),
        )
    ),
    BadRequest("input[1]", {**RIGHT[EMBEDDINGS], "input": ["a", ""]}, EMBEDDINGS),
    BadRequest("input[1]", {**RIGHT[EMBEDDINGS], "input": ["a", 5]}, EMBEDDINGS),
    BadRequest("input[0][0]", {**RIGHT[EMBEDDINGS], "input": [[[1]]]}, EMBEDDINGS),
    *(
        _at("/tokenize", "prompt", 400, "POST", body)
        for body in ({}, {"prompt": ""}, {"prompt": 5}, {"prompt": "\ud800"})
    ),
    *(_at("/detokenize", "tokens", 400, "POST", body) for body in ({}, {"tokens": [-1]}, {"tokens": [10**12]})),
    _at("/detokenize", "tokens[0]", 400, "POST", {"tokens": ["a"]}),
]


def _blocks(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


_MARK = {"type": "ephemeral"}
_IMAGE = {"type": "image", "source": {"type": "base64", "data": ""}}
_RESULT = {"type": "tool_result", "tool_use_id": "c"}
_FUNCTION = {"name": "f", "input_schema": {}}
_MESSAGES = [
    *(_message("max_tokens", max_tokens=value) for value in (None, -1, "4")),
    _message("model", 404, model="no-such-model"),
    *(_message("messages", messages=value) for value in ([], "Hello")),
    _message("messages: needs a message of the user", messages=[{"role": "system", "content": "Hello"}]),
    _message("the last one", messages=[*HELLO, {"role": "assistant", "content": "He"}]),
    _message("messages[1].content[0].type", messages=[*HELLO, _blocks({"type": "tool_use"}, role="system")]),
    *(
        _message(f"messages[0].content{words}", messages=[_blocks(*blocks)])
        for words, blocks in (
            *(("", []), ("[0].type", [{}]), ("[0]", ["Hello"]), ("[0].text", [{"type": "text"}])),
            ("[0].type", [{"type": "server_tool_us"}]),
            ("[0].type: images are not supported", [_IMAGE]),
            ("[0].source", [{"type": "document"}]),
            ("[0].source", [{**_IMAGE, "type": "document"}]),
            ("[0].type", [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]),
            ("[0].tool_use_id", [{"type": "tool_result", "content": "a"}]),
            ("[0].content[0].type: images are not supported", [{**_RESULT, "content": [_IMAGE]}]),
            ("[0].content[0].tool_name", [{**_RESULT, "content": [{"type": "tool_reference"}]}]),
        )
    ),
    _message("Unicode", messages=[_blocks({"type": "text", "text": "\ud800"})]),
    _message("cache_control", messages=[_blocks(*[{"type": "text", "text": "a", "cache_control": _MARK}] * 5)]),
    _message("ttl", messages=[_blocks({"type": "text", "text": "a", "cache_control": {**_MARK, "ttl": "2d"}})]),
    _message("cache_control", cache_control={"ttl": "5m"}),
    _message("system", system=5),
    _message("system[0].type: images are not supported", system=[_IMAGE]),
    _message("thinking.type", thinking={"type": 5}),
    _message("thread", thread={"type": "fork"}),
    *(_message("tools[0].name", tools=[tool]) for tool in ({"input_schema": {}}, {"type": "bash_20250124"})),
    _message("tools[0].name: ", tools=[{**_FUNCTION, "name": "a b"}]),
    _message("tools[0].input_schema", tools=[{"name": "f"}]),
    _message("tools[0]", tools=[{"type": 5, "name": "f"}]),
    _message("tools", tools=[{**_FUNCTION, "name": f"f{i}"} for i in range(129)]),
    _message("tool_choice", tools=[{"type": "web_search_20250305", "name": "s"}], tool_choice={"type": "any"}),
    _message("tool_choice.name", tools=[_FUNCTION], tool_choice={"type": "tool", "name": "g"}),
    _message("tool_choice.name", tools=[_FUNCTION], tool_choice={"type": "tool"}),
    _message("tool_choice", tools=[_FUNCTION], tool_choice="any"),
    _message("tool_choice", tool_choice={"type": "any"}),
    *(_message("stop_sequences", stop_sequences=value) for value in (list("abcdefghijklmnopq"), [""], [5], "x")),
    *(
        _message(name, **{name: value})
        for name, value in {"temperature": -1, "top_p": 2, "top_k": -2, "stream": "yes"}.items()
    ),
    *(
        _message("output_config.format", output_config={"format": value})
        for value in (
            {"type": "regex", "schema": {}},
            {"type": "json_schema"},
            {"type": "json_schema", "schema": {"not": {}}},
        )
    ),
    _message(
        "tool_choice",
        tools=[_FUNCTION],
        tool_choice={"type": "any"},
        output_config={"format": {"type": "json_schema", "schema": {}}},
    ),
    _message("mcp_servers", mcp_servers=[{"type": "url", "url": "http://127.0.0.1", "name": "a"}]),
    _message("container", container="container_a"),
    _message("session", session={"append": True}),
    _message("session", 404, session=_APPEND),
    _message("timeout_s", timeout_s=0),
    _message("messages", path=f"{MESSAGES}/count_tokens", messages=[]),
    _message("model", 404, f"{MESSAGES}/count_tokens", model="no-such-model"),
]

_TEXT = {"role": "user", "content": "x"}
_CUSTOM = {"type": "custom", "name": "f"}
_RESPONSES = [
    _response("model", 404, model="no-such-model"),
    *(
        _response(f"input[0]{param}", input=[item])
        for param, item in (
            *(("", 5), ("", {"type": "mesage", **_TEXT}), (".role", {"role": "wizard", "content": "a"})),
            (".id", {"type": "item_reference", "id": "msg_nobody_0"}),
            (".id", {**_TEXT, "id": "i" * 257}),
            (".input", {"type": "custom_tool_call", "call_id": "a", "name": "f"}),
            (".name", {"type": "function_call", "call_id": "a", "arguments": ""}),
            (".call_id", {"type": "function_call_output", "output": "a"}),
            (".content[0].text", {"role": "user", "content": [{"type": "input_text"}]}),
            (".content[0].type", {"role": "user", "content": [{"type": "input_image"}]}),
        )
    ),
    _response("input[1].id", input=[{**_TEXT, "id": "i"}] * 2),
    _response("metadata.a", metadata={"a": 5}),
    _response("previous_response_id", 404, previous_response_id="resp_nobody"),
    *(
        _response(f"tools{param}", tools=[tool])
        for param, tool in (
            *(("[0].type", {"type": 5, "name": "f"}), ("[0].name", {"type": "function"})),
            ("[0].tools", {"type": "namespace", "name": "f"}),
            ("[0].tools[0].name", {"type": "namespace", "name": "f", "tools": [{"type": "function"}]}),
            ("", {"type": "namespace", "name": "f", "tools": [{"type": "function", "name": "g"}] * 2}),
            ("[0].format.syntax", {**_CUSTOM, "format": {"type": "grammar"}}),
            (
                "[0].format.definition",
                {**_CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": "start: ("}},
            ),
        )
    ),
    _response("tool_choice", tool_choice="best", tools=[{"type": "function", "name": "f"}]),
    _response(
        "tool_choice.name", tool_choice={"type": "function", "name": "g"}, tools=[{"type": "function", "name": "f"}]
    ),
    _response("text.format.schema", text={"format": {"type": "json_schema", "name": "a"}}),
    _response("text.format.schema", text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "foo"}}}),
    _response("text.format.type", text={"format": {"type": "xml"}}),
    _response("prompt_cache_options.ttl", prompt_cache_options={"ttl": "2d"}),
    _response("reasoning.effort", reasoning={"effort": "hgih"}),
    *(
        _at(f"{RESPONSES}/{name}{behind}", "response_id", method=method)
        for method, behind in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"))
        for name in ("resp_nobody", "%ff")
    ),
    _at(f"{RESPONSES}/..%2f..%2fetc", None),
    *(_at(f"{RESPONSES}/{name}", "response_id", 400) for name in ("x" * 257, "%00")),
    *(_at(f"{RESPONSES}/resp_nobody/input_items?limit={value}", "limit", 400) for value in (0, "many")),
    _at(f"{RESPONSES}/resp_nobody/input_items?order=up", "order", 400),
    _at(f"{RESPONSES}/resp_nobody?cache_salt=", "cache_salt", 400),
]

# What every route with a body refuses.
_ANY_BODY = [
    BadRequest(param, body, path, method=method, headers=headers)
    for method, path in (
        *(("POST", path) for path in (COMPLETION, EMBEDDINGS, RESPONSES, MESSAGES, f"{MESSAGES}/count_tokens")),
        *(("POST", path) for path in ("/tokenize", "/detokenize", f"{SESSIONS}/s/fork")),
        *(("POST", f"/v1/kv/{name}") for name in ("warm", "lookup", "pin", "unpin")),
        ("DELETE", "/v1/kv"),
    )
    for body, headers, param in (
        (b"", {}, None),
        ([], {}, None),
        (b"a=b", {"content-type": "application/x-www-form-urlencoded"}, "content-type"),
    )
]

BAD_REQUESTS = [
    *(*_OF_VALUES, *_JSON, *_PLACES, *_CHAT, *_SESSIONS),
    *(*_PROMPTS, *_MESSAGES, *_RESPONSES, *_ANY_BODY),
]


def _post(headers: str, body: bytes = b"", path: str = CHAT) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}\r\n"
    return head.encode() + body


def _ours(name: str, status: int, sent: bytes) -> RawRequest:
    return RawRequest(name=name, sent=sent, statuses=frozenset({status}), is_ours=True)


def _refused(name: str, sent: bytes, *statuses: int) -> RawRequest:
    """By the HTTP server, or by what is before it."""
    return RawRequest(name=name, sent=sent, statuses=frozenset(statuses or (400, 413, 431)))


_CHUNKED = "Transfer-Encoding: chunked\r\n"
_EMPTY = _post("Content-Length: 2\r\n", b"{}")
_TRAILERS = b"2\r\n{}\r\n0\r\nContent-Type: text/plain\r\nX-Session-ID: a\xff\r\nAuthorization: Bearer a\r\n\r\n"
_STREAM = b'{"model":"$MODEL","stream":true,"messages":[{"role":"user","content":"Hello"}]}'
RAW_REQUESTS = [
    _ours("stalled body", 408, _post("Content-Length: 100\r\n", b"{")),
    _ours("stalled chunked body", 408, _post(_CHUNKED, b"1\r\n{\r\n")),
    _ours("body that never starts", 408, _post("Content-Length: 9\r\n")),
    _ours("length over the cap", 413, _post("Content-Length: 99999999\r\n")),
    _ours("chunks over the cap", 413, _post(_CHUNKED, (b"100000\r\n" + b" " * MIB + b"\r\n") * 9)),
    _ours("two content types", 400, _post("Content-Type: text/plain\r\nContent-Length: 2\r\n", b"{}")),
    _ours("two authorizations", 400, _post("Authorization: Bearer a\r\n" * 2 + "Content-Length: 2\r\n", b"{}")),
    *(
        _ours(f"{name} of other bytes", 400, _EMPTY.replace(b"\r\n", f"\r\n{name}: a".encode() + b"\xff\r\n", 1))
        for name in ("X-Session-ID", "X-Request-ID", "serve_multiplexed_model_id", "serve-multiplexed-model-id")
    ),
    _ours("trailers are no headers", 404, _post(_CHUNKED, _TRAILERS, path="/v1/nowhere")),
    _ours("pipelined bad requests", 400, _post("Content-Length: 1\r\n", b"{") * 3),
    _ours(
        "HTTP/1.0 with bad json",
        400,
        b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n{",
    ),
    _refused("garbage for a chunk size", _post(_CHUNKED, b"ZZZ\r\n{}\r\n")),
    _refused("negative length", _post("Content-Length: -5\r\n")),
    _refused("length a word", _post("Content-Length: many\r\n")),
    _refused("length and chunks", _post("Content-Length: 3\r\n" + _CHUNKED, b"0\r\n\r\n")),
    _ours("40 KB header", 413, _post(f"X-Padding: {'x' * 40_000}\r\nContent-Length: 0\r\n")),
    _refused("64 KB header", _post(f"X-Padding: {'x' * 65536}\r\nContent-Length: 0\r\n")),
    _refused("64 KB request line", b"GET /" + b"x" * 65536 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 400, 404, 413, 414, 431),
    _refused("not http", b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
    _refused("dots in the path", b"GET /v1/models/../../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", 400, 404),
    _refused("HEAD", b"HEAD /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    RawRequest(name="headers that never end", sent=b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: b"),
    RawRequest(name="nothing at all", sent=b""),
    RawRequest(name="hang up in the body", sent=_post("Content-Length: 100\r\n", b'{"model"')),
    RawRequest(name="a stream that nobody reads", sent=_post("Content-Length: $LENGTH\r\n", _STREAM)),
]
