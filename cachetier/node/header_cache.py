"""Headers of chunks that were read not long ago: a chain that is asked for again is found without its files."""

from __future__ import annotations

from collections import OrderedDict

from mneme.cachetier.chunk.header import ChunkHeader


class HeaderCache:
    """Of `max_headers` at most, some 3 KB each; what was used longest ago goes first."""

    def __init__(self, max_headers: int = 4096) -> None:
        self._max_headers = max_headers
        self._headers: OrderedDict[bytes, ChunkHeader] = OrderedDict()

    def __len__(self) -> int:
        return len(self._headers)

    def get(self, key: bytes) -> ChunkHeader | None:
        header = self._headers.get(key)
        if header is not None:
            self._headers.move_to_end(key)
        return header

    def keep(self, header: ChunkHeader) -> None:
        self._headers[header.key] = header
        self._headers.move_to_end(header.key)
        if len(self._headers) > self._max_headers:
            self._headers.popitem(last=False)

    def drop(self, key: bytes) -> None:
        self._headers.pop(key, None)
