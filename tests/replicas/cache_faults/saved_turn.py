"""Files that an engine left, and a next turn that another engine answers from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mneme.cachetier.chunk.file import ChunkReader, open_chunk
from mneme.cachetier.chunk.header import Chunk, ChunkHeader
from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.replicas.model.decoder import Decoder
from tests.cachetier.chunks import chunk_files
from tests.replicas.faulty_tier import NUM_NEW, Outcome, ask
from tests.replicas.tiered_engine import draw, full_prefill

FILES = FileOperations()


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Files that an engine left, and a next turn with its answer."""

    content: dict[Path, bytes]  # by path in the folder
    turn: list[int]
    num_history: int  # tokens whose KV is in the files
    answer: list[int]

    def put_into(self, folder: Path) -> list[Path]:
        """Full chunks in the order of the prompt, then the tail; nothing else is there then."""
        for other in chunk_files(folder):
            other.unlink()
        for path, content in self.content.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / path).write_bytes(content)
        return [folder / path for path in self.content]


def header_of(path: Path) -> ChunkHeader:
    return chunk_in(path).header


def chunk_in(path: Path) -> Chunk:
    reader = open_chunk(FILES, str(path))
    assert isinstance(reader, ChunkReader)
    with reader:
        layers = [np.empty(reader.header.layer_bytes, np.uint8) for _ in reader.header.checksums]
        assert reader.read(0, layers) is None
    return Chunk(reader.header, tuple(layers))


class NextTurn:
    """The next turn, by an engine that knows nothing but the files."""

    def __init__(self, decoder: Decoder, saved: Saved, folder: Path) -> None:
        self.decoder, self.saved, self.folder = decoder, saved, folder
        self.paths = saved.put_into(folder)

    def ask(self, **options: object) -> Outcome:
        found = ask(self.decoder, self.folder, {"turn": self.saved.turn}, is_reader=True, **options)  # type: ignore[arg-type]
        assert found.tokens["turn"] == self.saved.answer
        return found

    def ask_and_miss(self, *counters: str, **options: object) -> Outcome:
        """Some of it was computed, as these say; the next one finds sound files alone."""
        found = self.ask(**options)
        assert found.cached["turn"] < self.saved.num_history
        for name in counters:
            assert found.counters[name] > 0, (name, found.counters)
        return found


def save_turn(decoder: Decoder, folder: Path) -> Saved:
    """Let an engine answer a prompt of three full chunks and a tail."""
    ids = draw(1, 210)
    told = ids + ask(decoder, folder, {"a": ids}).tokens["a"]
    turn = [*told, *draw(2, 20)]
    paths = sorted(chunk_files(folder), key=lambda path: int(header_of(path).slot_position[0]))
    assert len(paths) == 4
    content = {path.relative_to(folder): path.read_bytes() for path in paths}
    return Saved(content=content, turn=turn, num_history=len(told) - 1, answer=full_prefill(decoder, turn, NUM_NEW)[0])
