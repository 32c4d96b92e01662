"""Token ids to text, as they come: never half a character, never any part of a stop string.

The text is a function of the ids alone, however they are grouped into pushes: the engine (which decides on
stop strings) and the ingress (which sends the text) run one `TextStream` each and must agree.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from mneme.replicas.request import SamplingParams
from mneme.replicas.text.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
_MAX_INCOMPLETE = 3  # bytes of a UTF-8 character that can wait for more, each decoded to U+FFFD
_MAX_WINDOW = 24  # tokens decoded again at each step, as long as the text is made of characters
_MAX_RUBBLE = 32  # and when it is not
_MIN_WINDOW = 4
# At least 9 bytes: whatever character the cut falls into, the last three U+FFFD lie behind it.
_RUBBLE_WINDOW = 12


class TextStream:
    """The text of one choice.

    `stop` strings are looked for in the text after the first `min_tokens` tokens; the text ends before one, or
    behind it with `includes_stop`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        includes_stop: bool = False,
    ) -> None:
        self._characters = _CharacterStream(tokenizer, skip_special_tokens)
        self._stop = tuple(stop)
        self._includes_stop = includes_stop
        self._unstoppable = min_tokens
        self._held = ""  # the longest end of the text that a stop string may begin with
        self._pieces: list[str] = []
        self._num_chars = array("i", [0])  # of the first n tokens' text, where there are stop strings
        self.stop_string: str | None = None  # that ended the text

    @staticmethod
    def of(tokenizer: Tokenizer, params: SamplingParams, min_tokens: int | None = None) -> TextStream:
        """Make the stream of a request's client; `min_tokens` of the output, where others than the request's."""
        num_unstoppable = params.min_tokens if min_tokens is None else min_tokens
        includes_stop = params.include_stop_str_in_output
        return TextStream(tokenizer, params.stop, params.skip_special_tokens, num_unstoppable, includes_stop)

    @property
    def stopped(self) -> bool:
        """Return whether a stop string has ended the text."""
        return self.stop_string is not None

    @property
    def text(self) -> str:
        """All that was returned so far."""
        return "".join(self._pieces)

    @property
    def num_whole_tokens(self) -> int:
        """Count the first tokens whose text was returned as a whole; known where there are stop strings."""
        return bisect_right(self._num_chars, len(self.text)) - 1

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens and return the text that has become safe to show; after a stop string, always empty."""
        return self._emit("".join(self._push_one(token_id) for token_id in token_ids))

    def finish(self) -> str:
        """Return what was held back, when no more tokens will come."""
        if self.stopped:
            return ""
        text = self._release(self._characters.finish())
        if not self.stopped:
            text, self._held = text + self._held, ""
        return self._emit(text)

    def _emit(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _push_one(self, token_id: int) -> str:
        if self.stopped:
            return ""
        text = self._characters.push(token_id)
        if self._stop:
            self._num_chars.append(self._characters.num_chars)
        if self._unstoppable > 0:
            self._unstoppable -= 1
            return text
        return self._release(text) if self._stop and text else text

    def _release(self, text: str) -> str:
        """Append complete characters; return those that no stop string can contain any more."""
        pending = self._held + text
        found = [(start, len(stop), stop) for stop in self._stop if (start := pending.find(stop)) >= 0]
        if found:
            self._held = ""
            start, size, self.stop_string = min(found)
            return pending[: start + size if self._includes_stop else start]
        num_safe = len(pending) - self._num_held(pending)
        self._held = pending[num_safe:]
        return pending[:num_safe]

    def _num_held(self, pending: str) -> int:
        """Count the characters of the longest end of `pending` that a stop string begins with."""
        sizes = ((stop, size) for stop in self._stop for size in range(1, min(len(stop), len(pending) + 1)))
        return max((size for stop, size in sizes if pending.endswith(stop[:size])), default=0)


class _CharacterStream:
    """Yields complete characters, by decoding a sliding window of the last tokens again.

    Invariant: `decode(window)[:given]` has been returned. What follows waits: it ends in U+FFFD, which may be
    the beginning of a character whose other bytes are still to come. Some decoders turn a whole run of byte
    tokens into U+FFFD as long as one of its characters is incomplete, so up to three tokens wait as a whole;
    after that only the last three U+FFFD can become anything else.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self.num_chars = 0  # of the text of all tokens, with what still waits
        self._window: list[int] = []
        self._given = 0
        self._num_decoded = 0  # characters of the window
        self._num_waiting = 0  # tokens since the text last ended in a complete character

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        self._num_waiting = self._num_waiting + 1 if text.endswith(_INCOMPLETE) else 0
        end = self._given if 0 < self._num_waiting <= _MAX_INCOMPLETE else len(text) - _num_incomplete(text)
        fresh = text[self._given : end]
        self.num_chars += len(text) - self._num_decoded
        self._num_decoded = len(text)
        self._given = max(self._given, end)
        if len(self._window) > (_MAX_RUBBLE if self._num_waiting else _MAX_WINDOW):
            self._slide(text)
        return fresh

    def finish(self) -> str:
        fresh = self._decode(self._window)[self._given :]
        self._window, self._given, self._num_decoded, self._num_waiting = [], 0, 0, 0
        return fresh

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _slide(self, text: str) -> None:
        """Forget the oldest tokens, at a place where a character ends if there is one."""
        waiting = len(text) - self._given
        size = next((n for n in range(_MIN_WINDOW, _RUBBLE_WINDOW) if self._ends(text, n)), _RUBBLE_WINDOW)
        self._window = self._window[-size:]
        self._num_decoded = len(self._decode(self._window))
        self._given = max(0, self._num_decoded - waiting)

    def _ends(self, text: str, size: int) -> bool:
        """Return whether the last `size` tokens alone give the end of the text."""
        end = self._decode(self._window[-size:])
        return end.strip(_INCOMPLETE) != "" and not end.startswith(_INCOMPLETE) and text.endswith(end)


def _num_incomplete(text: str) -> int:
    """Count how many of the last three characters are U+FFFD, from the end."""
    return len(text[-_MAX_INCOMPLETE:]) - len(text[-_MAX_INCOMPLETE:].rstrip(_INCOMPLETE))
