"""Where the KV of recent prompts came from, range by range: `GET /v1/kv/explain`. Policy only: no tensors."""

from __future__ import annotations

import re
from collections import deque
from typing import Any

from mneme.replicas.request import PromptUsage
from mneme.replicas.sequence import Sequence

MAX_EXPLANATIONS = 1024  # per engine
MAX_RANGES = 16_384  # in all of them together

_SUFFIX = re.compile(r"(-\d+)?(~\d+)?\.\d+")  # prompt, attempt and choice of one HTTP request


class Explanations:
    """The latest requests of an engine, oldest first; bounded in number and size."""

    def __init__(self) -> None:
        self._entries: deque[tuple[str, dict[str, Any]]] = deque()  # (tenant salt, explanation)
        self._num_ranges = 0

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, sequence: Sequence, usage: PromptUsage) -> None:
        """A prompt has been computed."""
        request = sequence.request
        ranges = [origin._asdict() for origin in sequence.origins.ranges(usage.prompt_tokens)]
        explanation = {
            "request_id": request.request_id,
            "choice": request.choice_index,
            "has_session": request.session_id is not None,
            "prompt_tokens": usage.prompt_tokens,
            "kv_details": usage.kv_details(),
            "ranges": ranges,
        }
        self._entries.append((request.salt, explanation))
        self._num_ranges += len(ranges)
        while len(self._entries) > MAX_EXPLANATIONS or self._num_ranges > MAX_RANGES:
            _, oldest = self._entries.popleft()
            self._num_ranges -= len(oldest["ranges"])

    def of(self, salt: str, http_id: str) -> list[dict[str, Any]]:
        """One entry for each choice of the HTTP request that ran here, also of those that were moved on."""
        return [e for owner, e in self._entries if owner == salt and _is_of(e["request_id"], http_id)]


def _is_of(request_id: str, http_id: str) -> bool:
    return request_id.startswith(http_id) and _SUFFIX.fullmatch(request_id, len(http_id)) is not None
