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


@dataclass(frozen=True)
class Target:
    """What a case needs to know about the server."""

    model: str
    max_context: int


@dataclass(frozen=True, kw_only=True)
class BadRequest:
    name: str
    body: bytes | dict[str, Any] | list[Any] | str | Callable[[Target], dict[str, Any]] = b""
    status: int = 400
    param: str | None
    method: str = "POST"
    path: str = "/v1/chat/completions"
    headers: Mapping[str, str] = field(default_factory=dict)

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


MESSAGES = [{"role": "user", "content": "Hello"}]


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": "$MODEL", "messages": MESSAGES, "max_tokens": 4, **changes}


def content(value: Any, role: str = "user") -> dict[str, Any]:
    return chat(messages=[{"role": role, "content": value}])


def _chat_json(fields: str) -> bytes:
    """A body that `json.dumps` would not write."""
    return b'{"model": "$MODEL", "messages": [{"role": "user", "content": "Hello"}], ' + fields.encode() + b"}"


def _nested(depth: int) -> bytes:
    return _chat_json('"metadata": ' + "[" * depth + "]" * depth)


def _tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def _case(name: str, param: str | None, **changes: Any) -> BadRequest:
    return BadRequest(name=name, body=chat(**changes), param=param)


def _completion(name: str, param: str | None, status: int = 400, **changes: Any) -> BadRequest:
    body = {"model": "$MODEL", "prompt": "Hello", "max_tokens": 4, **changes}
    return BadRequest(name=name, path="/v1/completions", body=body, param=param, status=status)


_JSON = [
    BadRequest(name="empty body", body=b"", param=None),
    BadRequest(name="not json", body=b"{'model': 1}", param=None),
    BadRequest(name="cut off json", body=b'{"model": "$MODEL", "messages": [{"ro', param=None),
    BadRequest(name="trailing garbage", body=_chat_json('"n": 1') + b"}", param=None),
    BadRequest(name="json array", body=[1, 2], param=None),
    BadRequest(name="json string", body="hello", param=None),
    BadRequest(name="json null", body=b"null", param=None),
    BadRequest(name="not utf-8", body=b'{"model": "\xff\xfe"}', param=None),
    BadRequest(name="utf-16", body=json.dumps(chat()).encode("utf-16"), param=None),
    BadRequest(name="duplicate keys", body=_chat_json('"n": 1, "n": 2'), param="n"),
    BadRequest(name="NaN", body=_chat_json('"temperature": NaN'), param=None),
    BadRequest(name="Infinity", body=_chat_json('"temperature": Infinity'), param=None),
    BadRequest(name="1e999", body=_chat_json('"temperature": 1e999'), param=None),
    BadRequest(name="integer of 5,000 digits", body=_chat_json('"seed": ' + "9" * 5000), param=None),
    BadRequest(name="nested 100 deep", body=_nested(100), param="metadata" + "[0]" * 24),
    BadRequest(name="nested 100,000 deep", body=_nested(100_000), param="body"),
    BadRequest(name="raw NUL in json", body=_chat_json('"user": "\0"'), param=None),
    BadRequest(
        name="form body",
        headers={"content-type": "application/x-www-form-urlencoded"},
        body=b"a=b",
        param="content-type",
    ),
    BadRequest(name="text body", headers={"content-type": "text/plain"}, body=chat(), param="content-type"),
    BadRequest(
        name="gzip bomb",
        headers={"content-encoding": "gzip"},
        body=gzip.compress(b" " * (20 * MIB), mtime=0),
        param="content-encoding",
    ),
    BadRequest(name="body of 9 MiB", body=b'"' + b" " * (9 * MIB) + b'"', status=413, param="body"),
]

_PLACES = [
    BadRequest(name="unknown path", path="/v1/nowhere", body=chat(), status=404, param=None),
    BadRequest(
        name="form to an unknown path",
        path="/v1/nowhere",
        headers={"content-type": "application/x-www-form-urlencoded"},
        body=b"a=b",
        status=404,
        param=None,
    ),
    BadRequest(name="unknown path, GET", path="/favicon.ico", method="GET", status=404, param=None),
    BadRequest(
        name="path traversal", path="/v1/models/..%2f..%2fetc%2fpasswd", method="GET", status=404, param="model"
    ),
    BadRequest(name="NUL in path", path="/v1/models/%00", method="GET", status=404, param="model"),
    BadRequest(name="chat by GET", method="GET", status=405, param=None),
    BadRequest(name="chat by DELETE", method="DELETE", status=405, param=None),
    BadRequest(name="chat by PUT", method="PUT", body=chat(), status=405, param=None),
    BadRequest(name="chat by OPTIONS", method="OPTIONS", status=405, param=None),
    BadRequest(name="models by POST", path="/v1/models", body=chat(), status=405, param=None),
    BadRequest(
        name="session id of 257 characters",
        headers={"X-Session-ID": "x" * 257},
        body=chat(),
        param="X-Session-ID",
    ),
    BadRequest(name="session id with a tab", headers={"X-Session-ID": "a\tb"}, body=chat(), param="X-Session-ID"),
]

_MESSAGES = [
    BadRequest(name="no messages", body={"model": "$MODEL"}, param="messages"),
    _case("messages null", "messages", messages=None),
    _case("messages empty", "messages", messages=[]),
    _case("messages a string", "messages", messages="Hello"),
    _case("message a string", "messages[0]", messages=["Hello"]),
    _case("5,000 messages", "messages", messages=MESSAGES * 5000),
    _case("unknown role", "messages[0].role", messages=[{"role": "wizard", "content": "Hello"}]),
    _case("no role", "messages[0].role", messages=[{"content": "Hello"}]),
    BadRequest(name="content null", body=content(None), param="messages[0].content"),
    BadRequest(name="content a number", body=content(5), param="messages[0].content"),
    BadRequest(name="content an object", body=content({"text": "Hello"}), param="messages[0].content"),
    BadRequest(name="content nested lists", body=content([["Hello"]]), param="messages[0].content[0]"),
    BadRequest(
        name="content an image",
        body=content([{"type": "image_url", "image_url": {"url": "http://x"}}]),
        param="messages[0].content[0].type",
    ),
    *(
        BadRequest(name=f"content {part}", body=content([part], "assistant"), param=f"messages[0].content[0].{param}")
        for part, param in (
            ({"type": "refusal"}, "refusal"),
            ({"type": "refusal", "text": "a"}, "refusal"),
            ({"type": "input_text", "refusal": "a"}, "text"),
            ({"type": "output_text", "text": None}, "text"),
            ({"type": "input_image", "image_url": "http://x"}, "type"),
            ({"type": "input_audio", "input_audio": {}}, "type"),
            ({"text": "a"}, "type"),
        )
    ),
    BadRequest(name="lone surrogate", body=content("a\ud800b"), param="messages[0].content"),
    BadRequest(name="lone low surrogate in a key", body=chat(metadata={"\udc00": 1}), param="metadata key"),
    BadRequest(name="a million letters", body=content("a" * MIB), param="messages"),
    BadRequest(name="seven million letters", body=content("x" * 7 * MIB), param="messages"),
    _case(
        "assistant with half a tool call",
        "messages[0].tool_calls[0].id",
        messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
    ),
    _case(
        "user with tool calls",
        "messages[0].tool_calls",
        messages=[
            {"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]}
        ],
    ),
    BadRequest(
        name="chat for one token more than the context has",
        body=lambda t: content("Hello") | {"max_tokens": t.max_context + 1},
        param="max_tokens",
    ),
    BadRequest(
        name="chat for one completion token more than the context has",
        body=lambda t: content("Hello") | {"max_completion_tokens": t.max_context + 1},
        param="max_completion_tokens",
    ),
    BadRequest(
        name="chat longer than the context",
        body=lambda t: content("the fox " * t.max_context),
        param="messages",
    ),
]

_MODEL_AND_SAMPLING = [
    BadRequest(name="unknown model", body=chat(model="no-such-model"), status=404, param="model"),
    BadRequest(name="model a path", body=chat(model="../../etc/passwd"), status=404, param="model"),
    BadRequest(name="model empty", body=chat(model=""), status=404, param="model"),
    _case("model a number", "model", model=5),
    _case("timeout 0", "timeout_s", timeout_s=0),
    _case("timeout negative", "timeout_s", timeout_s=-0.5),
    _case("timeout over a day", "timeout_s", timeout_s=86_401),
    _case("timeout 1e300", "timeout_s", timeout_s=1e300),
    _case("timeout 10**400", "timeout_s", timeout_s=10**400),
    _case("timeout text", "timeout_s", timeout_s="60"),
    _case("timeout true", "timeout_s", timeout_s=True),
    *(
        _case(f"document {value!r:.30}", param, documents=[value])
        for value, param in (
            ("", "documents[0]"),
            (5, "documents[0]"),
            (None, "documents[0]"),
            ({}, "documents[0].text"),
            ({"text": ""}, "documents[0].text"),
            ({"contents": ""}, "documents[0].contents"),
            ({"contents": ["a"]}, "documents[0].contents"),
            ({"text": "a", "title": 5}, "documents[0].title"),
        )
    ),
    _case("documents a text", "documents", documents="a"),
    _case("10,000 documents", "documents", documents=["a"] * 10_000),
    BadRequest(
        name="a document as long as the context",
        body=lambda t: chat(documents=["the fox " * t.max_context]),
        param="messages",
    ),
    _case("a gigantic document", "messages", documents=["a" * MIB]),
    _case("documents without a user", "documents", documents=["a"], messages=[{"role": "system", "content": "a"}]),
    BadRequest(
        name="document part empty",
        body=content([{"type": "document", "text": ""}]),
        param="messages[0].content[0].text",
    ),
    BadRequest(
        name="document part without text", body=content([{"type": "document"}]), param="messages[0].content[0].text"
    ),
    _completion("documents with two prompts", "documents", prompt=["a", "b"], documents=["a"]),
    _completion("documents with token ids", "documents", prompt=[5, 6], documents=["a"]),
    _completion("prompt of an image", "prompt[0].type", prompt=[{"type": "image", "text": "a"}]),
    _completion("prompt part empty", "prompt[0].text", prompt=[{"type": "document", "text": ""}]),
    *(
        _case(f"blend {name} {value!r}", f"blend.{name}", documents=["a"], blend={name: value})
        for name, value in (
            ("mode", "best"),
            ("mode", "reuse"),
            ("selector", "best"),
            ("ratio", -0.1),
            ("ratio", 1.1),
            ("ratio", True),
            ("ratio", "0.5"),
            ("min_tokens", -1),
            ("min_tokens", True),
            ("order", "best"),
            ("order", None),
            ("ordre", "any"),
        )
    ),
    BadRequest(name="blend a ratio of NaN", body=_chat_json('"documents": ["a"], "blend": {"ratio": NaN}'), param=None),
    _case("blend a word", "blend", documents=["a"], blend="auto"),
    _case("timeout a list", "timeout_s", timeout_s=[60]),
    BadRequest(name="timeout NaN", body=_chat_json('"timeout_s": NaN'), param=None),
    BadRequest(name="timeout Infinity", body=_chat_json('"timeout_s": Infinity'), param=None),
    _completion("timeout of a completion 0", "timeout_s", timeout_s=0),
    _case("max_tokens 0", "max_tokens", max_tokens=0),
    _case("max_tokens -1", "max_tokens", max_tokens=-1),
    _case("max_tokens 2^63", "max_tokens", max_tokens=2**63),
    _case("max_tokens a string", "max_tokens", max_tokens="5"),
    _case("max_tokens 5.5", "max_tokens", max_tokens=5.5),
    _case("max_tokens 1e300", "max_tokens", max_tokens=1e300),
    _case("max_tokens true", "max_tokens", max_tokens=True),
    _case("max_completion_tokens 0", "max_completion_tokens", max_completion_tokens=0),
    _case("min_tokens over max_tokens", "min_tokens", min_tokens=5),
    _case("max_tokens a billion", "max_tokens", max_tokens=10**9),
    _case("n 0", "n", n=0),
    _case("n -1", "n", n=-1),
    _case("n 129", "n", n=129),
    _case("n a billion", "n", n=10**9),
    _case("temperature -1", "temperature", temperature=-1),
    _case("temperature 1e308", "temperature", temperature=1e308),
    _case("temperature a string", "temperature", temperature="hot"),
    _case("temperature a list", "temperature", temperature=[1]),
    _case("top_p 0", "top_p", top_p=0),
    _case("top_p 2", "top_p", top_p=2),
    _case("top_k -2", "top_k", top_k=-2),
    _case("top_k 1.5", "top_k", top_k=1.5),
    _case("min_p 1.5", "min_p", min_p=1.5),
    _case("repetition_penalty 0", "repetition_penalty", repetition_penalty=0),
    _case("repetition_penalty 0.005", "repetition_penalty", repetition_penalty=0.005),
    _case("repetition_penalty 10.5", "repetition_penalty", repetition_penalty=10.5),
    _case("presence_penalty 3", "presence_penalty", presence_penalty=3),
    _case("frequency_penalty -3", "frequency_penalty", frequency_penalty=-3),
    _case("seed 2^64", "seed", seed=2**64),
    _case("seed a float", "seed", seed=0.5),
    _case("17 stops", "stop", stop=list("abcdefghijklmnopq")),
    _case("stops of 1,025 bytes", "stop", stop=["x" * 205] * 5),
    _case("100 stops", "stop", stop=["a"] * 100),
    _case("stop empty", "stop", stop=[""]),
    _case("stop of 257 bytes", "stop", stop="é" * 129),
    _case("stop of 1 MB", "stop", stop="x" * MIB),
    _case("stop a number", "stop", stop=5),
    _case("stop_token_ids negative", "stop_token_ids", stop_token_ids=[-1]),
    _case("stop_token_ids out of range", "stop_token_ids", stop_token_ids=[10**8]),
    _case("65 stop_token_ids", "stop_token_ids", stop_token_ids=list(range(65))),
    _case("no allowed_token_ids", "allowed_token_ids", allowed_token_ids=[]),
    _case("allowed_token_ids out of range", "allowed_token_ids", allowed_token_ids=[10**8]),
    _case("allowed_token_ids and a regex", "allowed_token_ids", allowed_token_ids=[5], guided_regex="a"),
    _case("bad_words a word", "bad_words", bad_words="word"),
    _case("bad_words blank", "bad_words", bad_words=[" "]),
    _case("65 bad_words", "bad_words", bad_words=["a"] * 65),
    _case("go on and begin", "continue_final_message", continue_final_message=True),
    _case("go on behind a user", "continue_final_message", continue_final_message=True, add_generation_prompt=False),
    _case("logit_bias of 1,025", "logit_bias", logit_bias={str(i): 1 for i in range(1025)}),
    _case("logit_bias of 100,000", "logit_bias", logit_bias={str(i): 1 for i in range(100_000)}),
    _case("logit_bias 1e9", "logit_bias[5]", logit_bias={"5": 1e9}),
    _case("logit_bias out of vocabulary", "logit_bias", logit_bias={"100000000": 1}),
    _case("logit_bias for a word", "logit_bias", logit_bias={"word": 1}),
    _case("logit_bias a list", "logit_bias", logit_bias=[1]),
    _case("top_logprobs without logprobs", "top_logprobs", top_logprobs=2),
    _case("top_logprobs 21", "top_logprobs", logprobs=True, top_logprobs=21),
    _case("top_logprobs -1", "top_logprobs", logprobs=True, top_logprobs=-1),
    _case("logprobs a number", "logprobs", logprobs=1),
    _case("stream a string", "stream", stream="yes"),
    _case("stream_options without stream", "stream_options", stream_options={"include_usage": True}),
    _case("stream_options a list", "stream_options", stream=True, stream_options=[]),
    _case("session_id empty", "session_id", session_id=""),
    _case("session_id with a newline", "session_id", session_id="a\nb"),
    _case("session_id of 257", "session_id", session_id="x" * 257),
    _case("include_stop_str_in_output a word", "include_stop_str_in_output", include_stop_str_in_output="yes"),
    _case("prompt_cache_key a number", "prompt_cache_key", prompt_cache_key=7),
    _case("cache_salt empty", "cache_salt", cache_salt=""),
    _case("cache_salt an object", "cache_salt", cache_salt={}),
    _case("tool_choice without tools", "tool_choice", tool_choice="required"),
    _case("tool_choice of none of the tools", "tool_choice.function.name", tools=[_tool()], tool_choice=_tool("g")),
    _case("tool_choice a number", "tool_choice", tools=[_tool()], tool_choice=7),
    _case("a tool that is no function", "tools[0].type", tools=[{"type": "custom", "custom": {"name": "f"}}]),
    _case(
        "tool_choice of allowed tools",
        "tool_choice.type",
        tools=[_tool()],
        tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [_tool()]}},
    ),
    _case(
        "a call of a custom tool",
        "messages[0].tool_calls[0].type",
        messages=[
            {"role": "assistant", "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "f", "input": ""}}]}
        ],
    ),
    _case("echo of a chat", "echo", echo=True),
    _case("a tool's name with blanks", "tools[0].function.name", tools=[_tool("f f")]),
    _case("two tools of a name", "tools", tools=[_tool(), _tool()]),
    _case("too many tools", "tools", tools=[_tool(f"f{i}") for i in range(129)]),
    _case(
        "tools with a $ref to nothing",
        "tools[0].function.parameters",
        tools=[_tool(parameters={"$ref": "#/a"})],
        tool_choice="required",
    ),
    _case(
        "tools with a keyword that is not known",
        "tools[0].function.parameters",
        tools=[_tool(parameters={"not": {}})],
        tool_choice="required",
    ),
    _case("tools of a megabyte", "tools", tools=[_tool(parameters={"const": "x" * MIB})], tool_choice="required"),
    _case(
        "tools and a format, both forced",
        "response_format",
        tools=[_tool()],
        tool_choice="required",
        response_format={"type": "json_object"},
    ),
    _case(
        "json schema without one",
        "response_format.json_schema.schema",
        response_format={"type": "json_schema", "json_schema": {}},
    ),
    _case("response format without schema", "response_format.json_schema", response_format={"type": "json_schema"}),
    _case("response format unknown", "response_format.type", response_format={"type": "xml"}),
    _case("keyword of no grammar", "guided_json", guided_json={"uniqueItems": True}),
    _case("guided_json a word", "guided_json", guided_json="word"),
    _case("regex with look-ahead", "guided_regex", guided_regex="a(?=b)"),
    _case("regex with open parentheses", "structured_outputs.regex", structured_outputs={"regex": "(" * 3000}),
    _case("regex too long", "guided_regex", guided_regex="a" * (1 << 18)),
    _case("no choice", "guided_choice", guided_choice=[]),
    _case("choice of a number", "guided_choice[0]", guided_choice=[1]),
    _case("grammar without its rule", "guided_grammar", guided_grammar="start: other"),
    _case("two grammars", "guided_regex", guided_regex="a", guided_choice=["a"]),
    _case("structural tag", "structured_outputs.structural_tag", structured_outputs={"structural_tag": "{}"}),
    _case("unknown constraint", "structured_outputs.xml", structured_outputs={"xml": "a"}),
    _case("audio", "modalities", modalities=["text", "audio"]),
    _case("logits processors", "logits_processors", logits_processors=["os.system"]),
    _case("template kwargs a list", "chat_template_kwargs", chat_template_kwargs=[1]),
    _case("own chat template", "chat_template", chat_template="{% for a in range(9) %}{% endfor %}"),
]

_TRUNCATION = [
    _case("truncate a share of 0", "truncation.ratio", session_id="s", truncation={"ratio": 0}),
    _case("truncate a share of 1", "truncation.ratio", session_id="s", truncation={"ratio": 1.0}),
    BadRequest(
        name="truncate a share of NaN", body=_chat_json('"session_id": "s", "truncation": {"ratio": NaN}'), param=None
    ),
    _case("truncate and keep -1", "truncation.keep_first", session_id="s", truncation={"keep_first": -1}),
    BadRequest(
        name="truncate and keep the window",
        body=lambda t: chat(session_id="s", truncation={"keep_first": t.max_context}),
        param="truncation.keep_first",
    ),
    _case("truncate and keep the best", "truncation.keep", session_id="s", truncation={"keep": "best"}),
    _case("reuse KV without a session", "truncation.strategy", truncation={"strategy": "reuse_kv"}),
    _case("truncation a word", "truncation", session_id="s", truncation="auto"),
    _case("truncation a list", "truncation", session_id="s", truncation=[]),
    *(
        _case(f"truncation with {name} {value!r}", f"truncation.{name}", session_id="s", truncation={name: value})
        for name, values in (
            ("ratio", (True, "half", None)),
            ("keep_first", (10**30, 1.5, True)),
            ("strategy", ("auto", None)),
        )
        for value in values
    ),
]

_APPEND = {"id": "nobody", "append": True}

_SESSIONS = [
    _case("session a string", "session", session="s"),
    _case("session id a number", "session.id", session={"id": 7}),
    _case("session id empty in the object", "session.id", session={"id": ""}),
    _case("session id with a NUL-like character", "session.id", session={"id": "a\x7fb"}),
    _case("append a string", "session.append", session={"id": "s", "append": "yes"}),
    _case("append without a session", "session.id", session={"append": True}),
    _case("ttl without a session", "session.id", session={"ttl_s": 60}),
    _case("ttl 0", "session.ttl_s", session={"id": "s", "ttl_s": 0}),
    _case("ttl negative", "session.ttl_s", session={"id": "s", "ttl_s": -1}),
    _case("ttl 1e300", "session.ttl_s", session={"id": "s", "ttl_s": 1e300}),
    _case("ttl 10**30", "session.ttl_s", session={"id": "s", "ttl_s": 10**30}),
    _case("ttl text", "session.ttl_s", session={"id": "s", "ttl_s": "60"}),
    _case("ttl true", "session.ttl_s", session={"id": "s", "ttl_s": True}),
    _case("ttl under a second", "session.ttl_s", session={"id": "s", "ttl_s": 0.999}),
    _case("ttl a list", "session.ttl_s", session={"id": "s", "ttl_s": [60]}),
    _case("ttl the text NaN", "session.ttl_s", session={"id": "s", "ttl_s": "NaN"}),
    BadRequest(name="ttl NaN", body=_chat_json('"session": {"id": "s", "ttl_s": NaN}'), param=None),
    BadRequest(name="ttl Infinity", body=_chat_json('"session": {"id": "s", "ttl_s": Infinity}'), param=None),
    BadRequest(name="ttl -Infinity", body=_chat_json('"session": {"id": "s", "ttl_s": -Infinity}'), param=None),
    BadRequest(name="ttl 1e999", body=_chat_json('"session": {"id": "s", "ttl_s": 1e999}'), param=None),
    BadRequest(name="append to nothing", body=chat(session=_APPEND), status=404, param="session_id"),
    BadRequest(
        name="stream of an append to nothing", body=chat(session=_APPEND, stream=True), status=404, param="session_id"
    ),
    BadRequest(name="append n choices to nothing", body=chat(session=_APPEND, n=3), status=404, param="session_id"),
    _completion("append text to nothing", "session_id", 404, session=_APPEND),
    _completion("append ids to nothing", "session_id", 404, prompt=[5, 6], session=_APPEND),
    _completion("append two prompts", "prompt", prompt=["a", "b"], session=_APPEND),
    BadRequest(
        name="append under another salt", body=chat(session=_APPEND, cache_salt="x"), status=404, param="session_id"
    ),
    BadRequest(name="get unknown session", path="/v1/sessions/nobody", method="GET", status=404, param="session_id"),
    BadRequest(name="get session without a name", path="/v1/sessions/", method="GET", param="session_id"),
    BadRequest(name="get session with a newline", path="/v1/sessions/a%0Ab", method="GET", status=404, param=None),
    BadRequest(name="get session with a NUL", path="/v1/sessions/%00", method="GET", param="session_id"),
    BadRequest(name="get session of bad UTF-8", path="/v1/sessions/%ff", method="GET", status=404, param="session_id"),
    BadRequest(name="get session of 257", path="/v1/sessions/" + "x" * 257, method="GET", param="session_id"),
    BadRequest(
        name="get session by a path", path="/v1/sessions/..%2f..%2fetc", method="GET", status=404, param="session_id"
    ),
    BadRequest(name="get session with a bad salt", path="/v1/sessions/s?cache_salt=", method="GET", param="cache_salt"),
    BadRequest(
        name="delete unknown session", path="/v1/sessions/nobody", method="DELETE", status=404, param="session_id"
    ),
    BadRequest(name="post to a session", path="/v1/sessions/s", body={}, status=405, param=None),
    BadRequest(name="fork unknown session", path="/v1/sessions/nobody/fork", body={}, status=404, param="session_id"),
    BadRequest(name="fork without a body", path="/v1/sessions/nobody/fork", param=None),
    BadRequest(name="fork to a number", path="/v1/sessions/s/fork", body={"session_id": 7}, param="session_id"),
    BadRequest(name="fork to nothing", path="/v1/sessions/s/fork", body={"session_id": ""}, param="session_id"),
    BadRequest(name="fork to a tab", path="/v1/sessions/s/fork", body={"session_id": "a\tb"}, param="session_id"),
    BadRequest(name="explain unknown request", path="/v1/kv/explain/x", method="GET", status=404, param="request_id"),
    BadRequest(name="explain nothing", path="/v1/kv/explain/", method="GET", param="request_id"),
    BadRequest(name="explain 200 characters", path="/v1/kv/explain/" + "x" * 200, method="GET", param="request_id"),
    BadRequest(name="explain a pattern", path="/v1/kv/explain/.*", method="GET", status=404, param="request_id"),
]

_PINS = [
    BadRequest(name="warm nothing", path="/v1/kv/warm", body={"model": "$MODEL"}, param="prompt"),
    BadRequest(name="warm without a body", path="/v1/kv/warm", param=None),
    BadRequest(name="delete unknown pin", path="/v1/kv/pins/nobody", method="DELETE", status=404, param="pin_id"),
    BadRequest(name="delete no pin", path="/v1/kv/pins/", method="DELETE", status=404, param="pin_id"),
    BadRequest(name="post to the pins", path="/v1/kv/pins", body={}, status=405, param=None),
]

_PROMPTS = [
    BadRequest(name="no prompt", path="/v1/completions", body={"model": "$MODEL"}, param="prompt"),
    _completion("prompt empty", "prompt", prompt=""),
    _completion("prompt an empty list", "prompt", prompt=[]),
    _completion("prompt null", "prompt", prompt=None),
    _completion("prompt an object", "prompt", prompt={}),
    _completion("one prompt of two empty", "prompt[1]", prompt=["a", ""]),
    _completion("prompt of mixed types", "prompt[1]", prompt=["a", [1]]),
    _completion("prompt of ids and text", "prompt[1]", prompt=[1, "a"]),
    _completion("prompt nested too deep", "prompt[0][0]", prompt=[[[1]]]),
    _completion("prompt id negative", "prompt", prompt=[-1]),
    _completion("prompt id out of range", "prompt", prompt=[10**9]),
    _completion("prompt id 2^70", "prompt", prompt=[2**70]),
    _completion("prompt id true", "prompt[0]", prompt=[True]),
    _completion("prompt id a float", "prompt[0]", prompt=[1.0]),
    _completion("prompt of a million ids", "prompt", prompt=[5] * 10**6),
    _completion("200 prompts", "prompt", prompt=["a"] * 200),
    _completion("65 prompts, each twice", "prompt", prompt=["a"] * 65, n=2),
    _completion("best_of", "best_of", best_of=3),
    _completion("suffix", "suffix", suffix="x"),
    _completion("logprobs of the prompt and a session", "prompt_logprobs", prompt_logprobs=1, session_id="s"),
    _completion("echo with logprobs and a session", "echo", echo=True, logprobs=1, session_id="s"),
    _completion("echo with logprobs of documents", "echo", echo=True, logprobs=1, documents=["Hello"]),
    _completion("echo with logprobs, truncated", "echo", echo=True, logprobs=1, truncation={"strategy": "recompute"}),
    _completion("logprobs of the prompt in a stream", "prompt_logprobs", prompt_logprobs=0, stream=True),
    _completion("all logprobs of the prompt", "prompt_logprobs", prompt_logprobs=-1),
    _completion("21 logprobs of the prompt", "prompt_logprobs", prompt_logprobs=21),
    _completion("logprobs of the prompt as text", "prompt_logprobs", prompt_logprobs="1"),
    _completion("no tokens and no echo", "max_tokens", max_tokens=0, prompt_logprobs=1),
    _completion("logprobs 21", "logprobs", logprobs=21),
    BadRequest(
        name="prompt as long as the context",
        path="/v1/completions",
        body=lambda t: {"model": t.model, "prompt": [5] * t.max_context, "max_tokens": 1},
        param="prompt",
    ),
    BadRequest(
        name="prompt that leaves less of the context than min_tokens",
        path="/v1/completions",
        body=lambda t: {"model": t.model, "prompt": [5] * (t.max_context - 4), "max_tokens": 5, "min_tokens": 5},
        param="max_tokens",
    ),
    BadRequest(
        name="one prompt of two longer than the context",
        path="/v1/completions",
        body=lambda t: {"model": t.model, "prompt": ["a", "the fox " * t.max_context], "max_tokens": 4},
        param="prompt[1]",
    ),
    BadRequest(name="tokenize nothing", path="/tokenize", body={"model": "$MODEL"}, param="prompt"),
    BadRequest(name="tokenize empty", path="/tokenize", body={"prompt": ""}, param="prompt"),
    BadRequest(name="tokenize a number", path="/tokenize", body={"prompt": 5}, param="prompt"),
    BadRequest(name="tokenize a surrogate", path="/tokenize", body={"prompt": "\ud800"}, param="prompt"),
    BadRequest(name="detokenize nothing", path="/detokenize", body={}, param="tokens"),
    BadRequest(name="detokenize a negative id", path="/detokenize", body={"tokens": [-1]}, param="tokens"),
    BadRequest(name="detokenize a huge id", path="/detokenize", body={"tokens": [10**12]}, param="tokens"),
    BadRequest(name="detokenize text", path="/detokenize", body={"tokens": ["a"]}, param="tokens[0]"),
]


def _message(name: str, status: int = 400, path: str = "/v1/messages", **changes: Any) -> BadRequest:
    """Anthropic's errors name no field: their message does."""
    return BadRequest(name=f"messages: {name}", path=path, body=chat(**changes), status=status, param=None)


def _blocks(*blocks: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(blocks)}]


_MARK = {"type": "ephemeral"}
_ANTHROPIC = [
    _message("without a limit", max_tokens=None),
    _message("a limit of -1", max_tokens=-1),
    _message("a limit that is text", max_tokens="4"),
    _message("an unknown model", 404, model="no-such-model"),
    _message("none", messages=[]),
    _message("a text", messages="Hello"),
    _message("nobody but the system", messages=[{"role": "system", "content": "Hello"}]),
    _message("a system's call", messages=[*MESSAGES, *_blocks({"type": "tool_use", "id": "a"}, role="system")]),
    _message("a block of no kind", messages=_blocks({"type": "server_tool"})),
    _message("a reference to no tool", messages=_blocks({"type": "tool_reference"})),
    _message("thinking of no kind", thinking={"type": 5}),
    _message("an assistant's last", messages=[*MESSAGES, {"role": "assistant", "content": "He"}]),
    _message("no blocks", messages=_blocks()),
    _message("an empty block", messages=_blocks({})),
    _message("a block without its text", messages=_blocks({"type": "text"})),
    _message("a block that is a text", messages=_blocks("Hello")),
    _message("an image", messages=_blocks({"type": "image", "source": {"type": "base64", "data": ""}})),
    _message("a file for a document", messages=_blocks({"type": "document", "source": {"type": "base64", "data": ""}})),
    _message("a document without its text", messages=_blocks({"type": "document"})),
    _message("a call by the user", messages=_blocks({"type": "tool_use", "id": "a", "name": "f", "input": {}})),
    _message("a result without its call", messages=_blocks({"type": "tool_result", "content": "a"})),
    _message("a surrogate", messages=_blocks({"type": "text", "text": "\ud800"})),
    _message("a system of numbers", system=5),
    _message("a system of images", system=[{"type": "image"}]),
    _message("five cache marks", messages=_blocks(*[{"type": "text", "text": "a", "cache_control": _MARK}] * 5)),
    _message(
        "a mark of two days", messages=_blocks({"type": "text", "text": "a", "cache_control": {**_MARK, "ttl": "2d"}})
    ),
    _message("a mark of no type", cache_control={"ttl": "5m"}),
    _message("a tool without a name", tools=[{"input_schema": {}}]),
    _message("a tool of another's without a name", tools=[{"type": "bash_20250124"}]),
    _message("a tool of no kind", tools=[{"type": 5, "name": "f"}]),
    _message(
        "a choice of a tool that is not run here", tools=[{"type": "web_search_20250305"}], tool_choice={"type": "any"}
    ),
    _message("129 tools", tools=[{"name": f"f{i}", "input_schema": {}} for i in range(129)]),
    _message(
        "a choice of none of the tools",
        tools=[{"name": "f", "input_schema": {}}],
        tool_choice={"type": "tool", "name": "g"},
    ),
    _message("a choice without a name", tools=[{"name": "f", "input_schema": {}}], tool_choice={"type": "tool"}),
    _message("a choice that is a word", tools=[{"name": "f", "input_schema": {}}], tool_choice="any"),
    _message("a choice without tools", tool_choice={"type": "any"}),
    _message("17 stops", stop_sequences=list("abcdefghijklmnopq")),
    _message("an empty stop", stop_sequences=[""]),
    _message("a stop that is a number", stop_sequences=[5]),
    _message("a temperature of -1", temperature=-1),
    _message("a top_p of 2", top_p=2),
    _message("a top_k of -2", top_k=-2),
    _message("a stream that is text", stream="yes"),
    _message("a thread of another kind", thread={"type": "fork"}),
    _message("an output format of another kind", output_config={"format": {"type": "regex", "schema": {}}}),
    _message("an output format without its schema", output_config={"format": {"type": "json_schema"}}),
    _message(
        "an output format that no grammar takes",
        output_config={"format": {"type": "json_schema", "schema": {"not": {}}}},
    ),
    _message(
        "a forced call in an output format",
        tools=[{"name": "f", "input_schema": {}}],
        tool_choice={"type": "any"},
        output_config={"format": {"type": "json_schema", "schema": {}}},
    ),
    _message("servers of tools", mcp_servers=[{"type": "url", "url": "http://127.0.0.1", "name": "a"}]),
    _message("a container", container="container_a"),
    _message("a session without its name", session={"append": True}),
    _message("a session that is unknown", 404, session=_APPEND),
    _message("a timeout of 0", timeout_s=0),
    _message("to count: none", path="/v1/messages/count_tokens", messages=[]),
    _message("to count: an unknown model", 404, path="/v1/messages/count_tokens", model="no-such-model"),
    _message("to count: an image", path="/v1/messages/count_tokens", messages=_blocks({"type": "image"})),
]


def _response(name: str, param: str | None, status: int = 400, **changes: Any) -> BadRequest:
    body = {"model": "$MODEL", "input": "Hello", "max_output_tokens": 4, "store": False, **changes}
    return BadRequest(name=f"responses: {name}", path="/v1/responses", body=body, status=status, param=param)


def _of_response(method: str, response_id: str, behind: str = "", param: str = "response_id", status: int = 404) -> Any:
    path = f"/v1/responses/{response_id}{behind}"
    return BadRequest(name=f"{method} {path:.60}", method=method, path=path, status=status, param=param)


_RESPONSES = [
    _response("no input", "input", input=None),
    _response("no items", "input", input=[]),
    _response("an item that is a number", "input[0]", input=[5]),
    _response("an item of no kind", "input[0]", input=[{"type": "mesage"}]),
    _response("items that are all left out", "input", input=[{"type": "computer_call"}]),
    _response("an item of nobody's", "input[0].id", input=[{"type": "item_reference", "id": "msg_nobody_0"}]),
    _response(
        "a raw call without its input",
        "input[0].input",
        input=[{"type": "custom_tool_call", "call_id": "a", "name": "f"}],
    ),
    _response("a message of nobody", "input[0].role", input=[{"role": "wizard", "content": "a"}]),
    _response(
        "a part without its text",
        "input[0].content[0].text",
        input=[{"role": "user", "content": [{"type": "input_text"}]}],
    ),
    _response("an image", "input[0].content[0].type", input=[{"role": "user", "content": [{"type": "input_image"}]}]),
    _response(
        "a call without its name", "input[0].name", input=[{"type": "function_call", "call_id": "a", "arguments": ""}]
    ),
    _response(
        "an output without its call", "input[0].call_id", input=[{"type": "function_call_output", "output": "a"}]
    ),
    _response("a surrogate", "input", input="\ud800"),
    _response("an unknown model", "model", 404, model="no-such-model"),
    _response("instructions of a number", "instructions", instructions=5),
    _response("a limit of 0", "max_output_tokens", max_output_tokens=0),
    _response("a limit of -1", "max_output_tokens", max_output_tokens=-1),
    _response("a temperature of 9", "temperature", temperature=9),
    _response("a top_p of 0", "top_p", top_p=0),
    _response("21 top_logprobs", "top_logprobs", top_logprobs=21),
    _response("in the background", "background", background=True),
    _response("a conversation", "conversation", conversation="conv_1"),
    _response("a stored prompt", "prompt", prompt={"id": "pmpt_1"}),
    _response("17 metadata", "metadata", metadata={str(i): "a" for i in range(17)}),
    _response("metadata of numbers", "metadata.a", metadata={"a": 5}),
    _response("metadata of 513 characters", "metadata", metadata={"a": "x" * 513}),
    _response("going on from nothing", "previous_response_id", 404, previous_response_id="resp_nobody"),
    _response("going on from a number", "previous_response_id", previous_response_id=5),
    _response("going on from a tab", "previous_response_id", previous_response_id="a\tb"),
    _response("a tool of no kind", "tools[0].type", tools=[{"type": 5, "name": "f"}]),
    _response("a namespace without tools", "tools[0].tools", tools=[{"type": "namespace", "name": "f"}]),
    _response(
        "a grammar that is none",
        "tools[0].format.definition",
        tools=[
            {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark", "definition": "start: ("}}
        ],
    ),
    _response("a tool without a name", "tools[0].name", tools=[{"type": "function"}]),
    _response("a choice of nothing", "tool_choice", tool_choice="best", tools=[{"type": "function", "name": "f"}]),
    _response(
        "a format without its schema", "text.format.schema", text={"format": {"type": "json_schema", "name": "a"}}
    ),
    _response("a format of no kind", "text.format.type", text={"format": {"type": "xml"}}),
    _response("a truncation of no kind", "truncation", truncation="best"),
    _response("a tier of no kind", "service_tier", service_tier="best"),
    _response("kept for two days", "prompt_cache_options.ttl", prompt_cache_options={"ttl": "2d"}),
    _response("store as text", "store", store="no"),
    _response("stream as text", "stream", stream="yes"),
    *(
        _of_response(method, response_id, behind)
        for method, behind in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"))
        for response_id in ("resp_nobody", "%ff")
    ),
    BadRequest(name="get response by a path", method="GET", path="/v1/responses/..%2f..%2fetc", status=404, param=None),
    _of_response("GET", "x" * 257, status=400),
    _of_response("GET", "%00", status=400),
    _of_response("GET", "resp_nobody", "/input_items?limit=0", "limit", 400),
    _of_response("GET", "resp_nobody", "/input_items?limit=many", "limit", 400),
    _of_response("GET", "resp_nobody", "/input_items?order=up", "order", 400),
    _of_response("GET", "resp_nobody", "?cache_salt=", "cache_salt", 400),
]

# Of every route with a body that the lists above leave out.
_OTHER_ROUTES = [
    BadRequest(name=f"{method} {path}: {name}", path=path, method=method, body=body, headers=headers, param=param)
    for method, path in (
        ("POST", "/v1/completions"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/v1/kv/warm"),
        ("POST", "/v1/kv/lookup"),
        ("POST", "/v1/kv/pin"),
        ("POST", "/v1/kv/unpin"),
        ("DELETE", "/v1/kv"),
    )
    for name, body, headers, param in (
        ("no body", b"", {}, None),
        ("an array", [], {}, None),
        ("a number for the model", {"model": 5, "input": "a", "prompt": "a", "tokens": [5]}, {}, "model"),
        ("a form", b"a=b", {"content-type": "application/x-www-form-urlencoded"}, "content-type"),
    )
]

# Routes that take nothing: there is only the method to get wrong.
_WITHOUT_PARAMETERS = [
    BadRequest(name=f"{method} {path}", method=method, path=path, status=405, param=None)
    for path in (
        *("/v1/models", "/v1/kv/stats", "/v1/kv/pins", "/health", "/ready", "/metrics", "/version"),
        *("/", "/docs", "/openapi.json"),
    )
    for method in ("POST", "DELETE")
]


def _embedding(name: str, param: str | None, status: int = 400, **changes: Any) -> BadRequest:
    body = {"model": "$MODEL", "input": "Hello", **changes}
    return BadRequest(name=f"embeddings: {name}", path="/v1/embeddings", body=body, param=param, status=status)


_EMBEDDINGS = [
    _embedding("no input", "input", input=None),
    _embedding("an empty text", "input", input=""),
    _embedding("no texts", "input", input=[]),
    _embedding("one text of two empty", "input[1]", input=["a", ""]),
    _embedding("an object", "input", input={}),
    _embedding("texts and ids", "input[1]", input=["a", 5]),
    _embedding("an id that is negative", "input", input=[-1]),
    _embedding("an id of 2^70", "input", input=[2**70]),
    _embedding("ids nested too deep", "input[0][0]", input=[[[1]]]),
    _embedding("a surrogate", "input", input="\ud800"),
    _embedding("an unknown model", "model", 404, model="no-such-model"),
    _embedding("a format of no kind", "encoding_format", encoding_format="hex"),
    _embedding("0 dimensions", "dimensions", dimensions=0),
    _embedding("dimensions as text", "dimensions", dimensions="8"),
    _embedding("truncated to 0", "truncate_prompt_tokens", truncate_prompt_tokens=0),
]

BAD_REQUESTS = [
    *_WITHOUT_PARAMETERS,
    *_EMBEDDINGS,
    *_JSON,
    *_PLACES,
    *_MESSAGES,
    *_MODEL_AND_SAMPLING,
    *_TRUNCATION,
    *_SESSIONS,
    *_PINS,
    *_PROMPTS,
    *_ANTHROPIC,
    *_RESPONSES,
    *_OTHER_ROUTES,
]


def _post(headers: str, body: bytes = b"", path: str = "/v1/chat/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}\r\n"
    return head.encode() + body


_CHUNKED = "Transfer-Encoding: chunked\r\n"
_REFUSED = frozenset({400, 413, 431})


def _ours(name: str, status: int, sent: bytes) -> RawRequest:
    return RawRequest(name=name, sent=sent, statuses=frozenset({status}), is_ours=True)


RAW_REQUESTS = [
    _ours("stalled body", 408, _post("Content-Length: 100\r\n", b"{")),
    _ours("stalled chunked body", 408, _post(_CHUNKED, b"1\r\n{\r\n")),
    _ours("body that never starts", 408, _post("Content-Length: 9\r\n")),
    _ours("length over the cap", 413, _post("Content-Length: 99999999\r\n")),
    _ours("chunks over the cap", 413, _post(_CHUNKED, (b"100000\r\n" + b" " * MIB + b"\r\n") * 9)),
    _ours("two content types", 400, _post("Content-Type: text/plain\r\nContent-Length: 2\r\n", b"{}")),
    _ours(
        "two authorizations",
        400,
        _post("Authorization: Bearer a\r\nAuthorization: Bearer b\r\nContent-Length: 2\r\n", b"{}"),
    ),
    *(
        _ours(
            f"{header} of other bytes",
            400,
            _post("Content-Length: 2\r\n", b"{}").replace(b"\r\n", b"\r\n" + header.encode() + b": a\xff\r\n", 1),
        )
        for header in ("X-Session-ID", "X-Request-ID", "serve_multiplexed_model_id", "serve-multiplexed-model-id")
    ),
    _ours(
        "trailers are no headers",
        404,
        _post(
            "Transfer-Encoding: chunked\r\n",
            b"2\r\n{}\r\n0\r\nContent-Type: text/plain\r\nX-Session-ID: a\xff\r\nAuthorization: Bearer a\r\n\r\n",
            path="/v1/nowhere",
        ),
    ),
    RawRequest(name="garbage for a chunk size", sent=_post(_CHUNKED, b"ZZZ\r\n{}\r\n"), statuses=_REFUSED),
    RawRequest(name="negative length", sent=_post("Content-Length: -5\r\n"), statuses=_REFUSED),
    RawRequest(name="length a word", sent=_post("Content-Length: many\r\n"), statuses=_REFUSED),
    RawRequest(
        name="length and chunks",
        sent=_post("Content-Length: 3\r\n" + _CHUNKED, b"0\r\n\r\n"),
        statuses=_REFUSED,
    ),
    RawRequest(
        name="40 KB header", sent=_post(f"X-Padding: {'x' * 40_000}\r\nContent-Length: 0\r\n"), statuses=_REFUSED
    ),
    RawRequest(
        name="64 KB header",
        sent=_post(f"X-Padding: {'x' * 65536}\r\nContent-Length: 0\r\n"),
        statuses=_REFUSED,
    ),
    RawRequest(
        name="64 KB request line",
        sent=b"GET /" + b"x" * 65536 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        statuses=frozenset({400, 404, 413, 414, 431}),
    ),
    RawRequest(name="not http", sent=b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", statuses=frozenset({400})),
    RawRequest(name="headers that never end", sent=b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: b"),
    RawRequest(name="nothing at all", sent=b""),
    RawRequest(name="HEAD", sent=b"HEAD /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n", statuses=frozenset({405})),
    _ours(
        "HTTP/1.0 with bad json",
        400,
        b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n{",
    ),
    _ours("pipelined bad requests", 400, _post("Content-Length: 1\r\n", b"{") * 3),
    RawRequest(
        name="dots in the path",
        sent=b"GET /v1/models/../../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
        statuses=frozenset({400, 404}),
    ),
    RawRequest(name="hang up in the body", sent=_post("Content-Length: 100\r\n", b'{"model"')),
    RawRequest(
        name="a stream that nobody reads",
        sent=_post(
            "Content-Length: $LENGTH\r\n",
            b'{"model":"$MODEL","stream":true,"messages":[{"role":"user","content":"Hello"}]}',
        ),
    ),
]
