"""Prompts with documents: each part of the text is tokenized on its own, so no token spans the border of a document.

Chat templates know messages, which are text. A stand-in takes a document's place until the template has rendered; the
text is then cut there. Behind the first part nothing is added to a part: no BOS, no space before its first word.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mneme.errors import InvalidRequest
from mneme.replicas.documents import BESIDE, Document, DocumentSpan
from mneme.replicas.request import History
from mneme.replicas.text.prompts import Appended
from mneme.replicas.text.tokenizer import Tokenizer

Conversation = Sequence[Mapping[str, Any]]  # messages

_BETWEEN = "\n\n"  # behind a document that the API and not the client has put before a text


class Part(NamedTuple):
    """A piece of a prompt's text."""

    text: str
    document: Document | None = None  # None: other text


class EncodedPrompt(NamedTuple):
    """A prompt's ids, and where its documents are in them and in its text."""

    token_ids: tuple[int, ...]
    text: str | None = None  # None where the client gave ids
    documents: tuple[DocumentSpan, ...] = ()
    num_system: int = 0  # tokens of the system prompt, where a truncation asks for it
    num_closing_chars: int = 0  # of what is appended: they close the answer before it
    history: History | None = None

    def last(self, num_tokens: int | None) -> EncodedPrompt:
        """Return its last tokens, which have no text, if it has more; None: all. Raises `InvalidRequest`."""
        if num_tokens is None or len(self.token_ids) <= num_tokens:
            return self
        if self.documents:
            raise InvalidRequest("truncate_prompt_tokens", num_tokens, "cannot cut a prompt with documents")
        return EncodedPrompt(self.token_ids[-num_tokens:])


def encode_parts(tokenizer: Tokenizer, parts: Sequence[Part], *, add_special_tokens: bool = False) -> EncodedPrompt:
    """Encode each part on its own; the first is text, which may be empty.

    add_special_tokens  those before the whole prompt

    Raises `InvalidRequest` for a document without a token.
    """
    ids: list[int] = []
    spans = []
    num_chars = 0
    for index, (text, document) in enumerate(parts):
        start = len(ids)
        if index == 0:
            ids += tokenizer.encode(text, add_special_tokens=add_special_tokens)
        elif text:
            encode = tokenizer.encode_continuation if document is None else tokenizer.encode_foreign
            ids += encode(text)
        if document is not None:
            if len(ids) == start:
                raise InvalidRequest("documents", document.name, "each document must have at least one token")
            spans.append(DocumentSpan(start, len(ids), document.name, num_chars, num_chars + len(text), document.group))
        num_chars += len(text)
    return EncodedPrompt(tuple(ids), "".join(part.text for part in parts), tuple(spans))


def prompt_parts(prompt: str | Sequence[Mapping[str, Any]], documents: Sequence[object]) -> tuple[Part, ...]:
    """Cut a prompt that no template renders: `documents`, then a text or its parts. Raises `InvalidRequest`."""
    stand_ins = StandIns(documents)
    text = prompt if isinstance(prompt, str) else stand_ins.content(prompt, "prompt", group=0)
    return stand_ins.cut(stand_ins.before(text))


class StandIns:
    """Stands for the documents of one request while its template renders: words that no text can foresee."""

    def __init__(self, documents: Sequence[object] = ()) -> None:
        """`documents`: what the request says beside its messages; raises `InvalidRequest`."""
        self._key = secrets.token_hex(12)
        self._documents: list[Document] = []
        self._beside = [self.put(each, f"documents[{i}]", group=BESIDE) for i, each in enumerate(documents)]

    def put(self, given: object, where: str, *, group: int) -> str:
        """Return what stands for a document of the message `group`; raises `InvalidRequest`."""
        index = len(self._documents)
        self._documents.append(Document.of(given, where, index=index, group=group))
        return f"{self._key}{index:04x}"

    def content(self, given: Sequence[Mapping[str, Any]], where: str, *, group: int) -> str:
        """Join the parts of one message: lines, but that nothing stands between a document and its neighbours.

        Raises `InvalidRequest` for what is no part.
        """
        text, was_text = "", False
        for index, part in enumerate(given):
            is_text = isinstance(part, Mapping) and part.get("type", "text") == "text"
            if is_text and isinstance(part.get("text"), str):
                text += "\n" * was_text + part["text"]
            elif isinstance(part, Mapping) and part.get("type") == "document":
                text += self.put(part, f"{where}[{index}]", group=group)
            else:
                raise InvalidRequest(f"{where}[{index}]", part, 'must be {"type": "text" or "document", "text": ...}')
            was_text = is_text
        return text

    @property
    def variables(self) -> dict[str, Any]:
        """Return what templates with a place for documents read."""
        return {"documents": [{"title": "", "text": each} for each in self._beside]} if self._beside else {}

    def placed(self, render: Callable[[Conversation], Appended], messages: Conversation) -> Appended:
        """Render with the documents beside the messages where the template puts them, else before the last user's text.

        Raises `InvalidRequest` as `render` does, and if there is no place for them.
        """
        rendered = render(messages)
        if not self._beside or any(each in rendered.text for each in self._beside):
            return rendered
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
        if last is None:
            rule = "the chat template has no place for them: they need a user's message to stand before"
            raise InvalidRequest("documents", len(self._beside), rule)
        content = self.before(messages[last]["content"] or "")
        return render([*messages[:last], {**messages[last], "content": content}, *messages[last + 1 :]])

    def before(self, text: str) -> str:
        """Put the documents beside the text before it."""
        return "".join(f"{each}{_BETWEEN}" for each in self._beside) + text

    def cut(self, rendered: str, *, is_whole: bool = True) -> tuple[Part, ...]:
        """Cut a rendered text at its documents.

        is_whole  it must have each once; raises `InvalidRequest` if the template left one out, changed or repeated it
        """
        texts = re.split(f"{self._key}([0-9a-f]{{4}})", rendered)
        found = [int(each, 16) for each in texts[1::2]]
        if is_whole and Counter(found) != Counter(range(len(self._documents))):
            raise InvalidRequest("documents", len(self._documents), "this model's chat template rewrites documents")
        parts = [Part(texts[0])]
        for index, text in zip(found, texts[2::2], strict=True):
            parts += [Part(self._documents[index].text, self._documents[index]), Part(text)]
        return tuple(parts)

    def encode_prefix(self, tokenizer: Tokenizer, rendered: str) -> list[int]:
        """Encode what a conversation begins with, which may lack some of the documents."""
        return list(encode_parts(tokenizer, self.cut(rendered, is_whole=False)).token_ids)
