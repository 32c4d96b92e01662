"""A checkpoint's tokenizer: text to ids and back, and the chat template.

Loaded through `transformers` (which knows every checkpoint's quirks), used through the Rust tokenizer
underneath, which is safe to share between threads and releases the interpreter lock while it encodes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from mneme.errors import CheckpointError, InvalidRequest, shown
from mneme.replicas.text.templates import MAX_RENDER_S, ChatTemplate

_GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
_NORMALIZER_SHRINKAGE = 4  # NFC and its like may make a text this many times shorter before it is tokenized
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # how SentencePiece vocabularies write a single byte


def _byte_by_char() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_BY_CHAR = _byte_by_char()


class Tokenizer:
    """Encodes, decodes and renders chats. Thread-safe; ids outside the vocabulary decode to nothing."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        max_render_s: float = MAX_RENDER_S,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._backend = backend
        self._is_byte_level = b'"ByteLevel"' in _state_of(backend.decoder)
        self._longest_token_bytes = max((len(token.encode()) for token in vocabulary), default=1)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        # A document that has one written in it must not act as the template does.
        markup = sorted((each.content for each in backend.get_added_tokens_decoder().values()), key=len, reverse=True)
        self._markup = re.compile("|".join(re.escape(each) for each in markup if len(each) > 1) or r"(?!)")
        self.chat_template_source = chat_template or ""
        self._chat_template = chat_template and ChatTemplate(
            chat_template, template_variables or {}, max_render_s=max_render_s
        )

    @staticmethod
    def load(model_dir: Path) -> Tokenizer:
        """Read from local files only, running no code of the checkpoint; raises `CheckpointError`."""
        if not model_dir.is_dir():
            raise CheckpointError(f"{model_dir}: no such directory")
        loaded = _load_with_transformers(model_dir)
        backend = getattr(loaded, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise CheckpointError(f"{model_dir}: needs a tokenizer.json (slow tokenizers are not supported)")
        return Tokenizer(
            backend,
            bos_token_id=loaded.bos_token_id,
            eos_token_ids=_eos_token_ids(model_dir, loaded.eos_token_id),
            chat_template=_default_template(loaded.chat_template),
            template_variables=loaded.special_tokens_map,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, special tokens written in it included; `InvalidRequest` on lone surrogates.

        `add_special_tokens`: also those that the model expects around a text, as Hugging Face's tokenizers add.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # what the Rust side says to text that is not valid Unicode
            raise InvalidRequest("text", None, "must be valid Unicode: it has a lone surrogate") from error
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """Encode a rendered chat: its special tokens are in the text, so none is added."""
        return self.encode(text, add_special_tokens=False)

    def encode_continuation(self, text: str) -> list[int]:
        """Encode text that goes on where other text has ended.

        Encoded behind a special token, which is then dropped: some tokenizers put a space before the first word.
        """
        if not self.eos_token_ids:
            return self.encode_rendered(text)
        marker = self.eos_token_ids[0]
        ids = self.encode_rendered(self.token_text(marker) + text)
        return ids[1:] if ids[:1] == [marker] else self.encode_rendered(text)

    def encode_foreign(self, text: str) -> list[int]:
        """Encode text of others behind other text: a special token that is written in it is text as any."""
        pieces, start = [], 0
        for found in self._markup.finditer(text):
            pieces.append(text[start : found.start() + 1])
            start = found.start() + 1
        return [token_id for piece in (*pieces, text[start:]) if piece for token_id in self.encode_continuation(piece)]

    @property
    def sink_ids(self) -> list[int]:
        """Return what every text prompt begins with: the model's BOS, or nothing."""
        return self.encode("", add_special_tokens=True)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Decode one token alone, special or not; U+FFFD where it is a part of a character."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_id(self, text: str) -> int | None:
        """Return the id of a token that is written so, special or not; None: there is none."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for, also where they are only a part of a character."""
        token = self._backend.id_to_token(token_id) or ""
        if self._is_byte_level and all(char in _BYTE_BY_CHAR for char in token):
            return bytes(_BYTE_BY_CHAR[char] for char in token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        return self.token_text(token_id).encode()

    def min_num_tokens(self, text: str) -> int:
        """Bound from below the tokens of any way to write `text`, from its size alone."""
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        return num_bytes // (self._longest_token_bytes * _NORMALIZER_SHRINKAGE)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the text of a conversation, special tokens included.

        Raises `InvalidRequest` if the model has no template, or the template refuses the messages, does not
        end in time, or grows without bound. Blocks for up to that time; `template_variables` are JSON values.
        """
        if not self._chat_template:
            raise InvalidRequest("messages", f"{len(messages)} messages", "this model has no chat template")
        variables = {**(template_variables or {}), "add_generation_prompt": add_generation_prompt}
        return self._chat_template.render(messages, variables)

    def to_json(self) -> str:
        """Serialize it as `tokenizer.json` does."""
        text: str = self._backend.to_str()
        return text

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_template)

    def warm_up(self) -> None:
        """Build what the first conversation would: the processes that render templates, tables of the tokenizer."""
        self.decode(self.encode("warm"), skip_special_tokens=True)
        if self._chat_template:
            self._chat_template.start()

    def close(self) -> None:
        """End the processes that render templates."""
        if self._chat_template:
            self._chat_template.close()


def _state_of(decoder: Any) -> bytes:
    state: bytes = b"" if decoder is None else decoder.__getstate__()
    return state


def _load_with_transformers(model_dir: Path) -> Any:
    # Imported here: slow, and only needed to load. AutoTokenizer would also bring torch's compiler along, so a
    # checkpoint that itself names the generic class, which is what AutoTokenizer would choose, gets it directly.
    path = model_dir / "tokenizer_config.json"
    config = _read_json(path)
    if config.get("auto_map"):
        rule = f"code of a model's own is never run (got {shown(config['auto_map'])})"
        raise CheckpointError(f"{path}: auto_map: {rule}")
    if config.get("tokenizer_class") in _GENERIC_CLASSES:
        from transformers import PreTrainedTokenizerFast as Loader
    else:
        from transformers import AutoTokenizer as Loader
    try:
        return Loader.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a damaged or hostile file makes it raise
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(f"{model_dir}: the tokenizer cannot be loaded: {reason[:200]}") from error


def _default_template(templates: object) -> str | None:
    """Choose the template; checkpoints with several named ones call the usual one "default"."""
    if isinstance(templates, Mapping):
        templates = templates.get("default")
    return templates if isinstance(templates, str) else None


def _eos_token_ids(model_dir: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Collect the tokenizer's end tokens, and those of generation_config.json, else of config.json."""
    listed = None
    for name in ("generation_config.json", "config.json"):
        listed = _read_json(model_dir / name).get("eos_token_id") if listed is None else listed
    found = listed if isinstance(listed, list) else [listed]
    if not all(token_id is None or (type(token_id) is int and token_id >= 0) for token_id in found):
        raise CheckpointError(f"{model_dir}: eos_token_id must be a token id or a list of them")
    return tuple(dict.fromkeys(token_id for token_id in [tokenizer_eos, *found] if token_id is not None))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return content
