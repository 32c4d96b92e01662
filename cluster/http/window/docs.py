"""Shows the OpenAPI document to people: operations by tag, with fields, an example and a form that sends it.

The page needs no script to be read; `assets/docs.js` sends what the forms say. Whatever is of the document is escaped.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_KEY = (
    '<form id="key-form" aria-label="API key"><label for="key">API key</label>'
    '<input id="key" type="password" autocomplete="off">'
    "<span>Kept in this tab only.</span></form>"
)
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/ui/app.css">
<script type="module" src="/docs/docs.js"></script>
</head>
<body class="docs">
<header><h1>{title}</h1><nav aria-label="pages"><a href="/">what runs here</a> <a href="/ui">live page</a> \
<a href="/openapi.json">openapi.json</a></nav></header>
{key}<main>{content}</main>
</body>
</html>
"""


def docs_page(document: Mapping[str, Any], *, needs_key: bool) -> str:
    """`GET /docs`; `needs_key`: requests need an API key, so one may be typed in."""
    operations = [
        (operation, f"{method.upper()} {path}")
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = document["components"]["schemas"]
    sections = [
        _section(
            tag["name"],
            tag["description"],
            [_operation(*each, schemas) for each in operations if tag["name"] in each[0]["tags"]],
        )
        for tag in document["tags"]
    ]
    types = [
        _details(name, "", [_about(schema), _fields(name, schema)], name) for name, schema in sorted(schemas.items())
    ]
    title = html.escape("{title} {version}: HTTP API".format(**document["info"]))
    content = "".join([*sections, _section("Types", "What bodies and answers are made of.", types)])
    return _PAGE.format(title=title, key=_KEY if needs_key else "", content=content)


def _section(name: str, about: str, parts: Iterable[str]) -> str:
    return f'<section class="wide"><h2>{_text(name)}</h2><p class="hint">{_text(about)}</p>{"".join(parts)}</section>'


def _details(shown: str, about: str, parts: Iterable[str], name: str) -> str:
    """A part that is opened by who wants to read it, or follows a link to `name`."""
    summary = f"<summary><code>{html.escape(shown)}</code> {_text(about)}</summary>"
    return f'<details>{summary}<div id="{html.escape(name)}">{"".join(parts)}</div></details>'


def _operation(operation: Mapping[str, Any], asked: str, schemas: Mapping[str, Any]) -> str:
    (taken,) = operation["requestBody"]["content"].values() if "requestBody" in operation else (None,)
    parts = [_about(operation), "<h3>Try it</h3>", _form(asked, operation, taken)]
    if parameters := operation["parameters"]:
        rows = (
            (
                f"{_code(each['name'])}{' required' * each['required']}",
                html.escape(each["in"]),
                _text(each["description"]),
            )
            for each in parameters
        )
        parts += ["<h3>Parameters</h3>", _table(f"parameters of {asked}", ("name", "in", "meaning"), rows)]
    if taken is not None:
        name = taken["schema"]["$ref"].rpartition("/")[2]
        parts += [f"<h3>Body: {_type(taken['schema'])}</h3>", _fields(name, schemas[name])]
    parts.append("<h3>Answer</h3>")
    for status, answer in operation["responses"].items():
        shown = status if status.isdecimal() else "else"
        parts += [
            f"<p>{shown}, {html.escape(kind)}: {_type(of['schema'])}</p>" for kind, of in answer["content"].items()
        ]
    return _details(asked, operation["summary"], parts, operation["operationId"])


def _form(asked: str, operation: Mapping[str, Any], taken: Mapping[str, Any] | None) -> str:
    method, path = asked.split(" ", 1)
    inputs = [
        f'<label>{html.escape(each["name"])} <input name="{html.escape(each["name"])}" data-in="{each["in"]}" '
        f'value="{html.escape(each.get("example", ""))}"{" required" * each["required"]}></label>'
        for each in operation["parameters"]
        if each["in"] in ("path", "query")
    ]
    if taken is not None:
        example = json.dumps(taken["example"], indent=2, ensure_ascii=False)
        rows = example.count("\n") + 1
        area = f'<textarea name="body" rows="{rows}" spellcheck="false">{html.escape(example)}</textarea>'
        inputs.append(f"<label>Body{area}</label>")
    return (
        f'<form data-method="{method}" data-path="{html.escape(path)}">{"".join(inputs)}'
        '<pre class="curl" tabindex="0" role="group" aria-label="the same with curl"></pre>'
        '<div class="row"><button>Send</button> <button type="button" class="stop" hidden>Stop</button>'
        " <output></output></div>"
        '<pre class="answer" tabindex="0" role="group" aria-label="answer" hidden></pre></form>'
    )


def _fields(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = (
        (f"{_code(field)}{' required' * (field in required)}", _type(about), _text(about["description"]))
        for field, about in schema.get("properties", {}).items()
    )
    return _table(f"fields of {name}", ("field", "type", "meaning"), rows)


def _table(label: str, titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{title}" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{cell}' for cell in row)}" for row in rows)
    table = f"<table><thead><tr>{head}<tbody>{body}</table>"
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{html.escape(label)}">{table}</div>'


def _type(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in schema:
        name = html.escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if several := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_type, several)))
    if "enum" in schema or "const" in schema:
        return ", ".join(html.escape(json.dumps(value)) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return html.escape(schema.get("type", "any"))


def _about(described: Mapping[str, Any]) -> str:
    about = described.get("description")
    return f'<p class="about">{_text(about)}</p>' if about else ""


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def _text(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
