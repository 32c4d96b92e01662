"""Engines of bench_truncation.py: given texts run through real sessions, past the window.

Teacher forcing is no API of the engine. `TaughtRunner` stands between the decoder and the sampler: of each row it notes
what the model thought of the text's next token, then hands on logits that leave no other choice. All else, scheduler,
forest, truncation, plans and attention, is what serves requests.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mneme.errors import MnemeError
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.forest.moves import Moves
from mneme.replicas.model.config import load_model_config
from mneme.replicas.model.decoder import Decoder, StepInputs
from mneme.replicas.model.runner import Runner
from mneme.replicas.model.weights import load_weights
from mneme.replicas.request import GenerationRequest, PromptUsage, SamplingParams
from mneme.replicas.sequence import Chunk, Sequence
from mneme.replicas.truncation import Truncation

PAGE_SIZE = 32


class Thought(NamedTuple):
    """What the model expected where the text has a token."""

    nats: float  # of that token
    choice: int  # the most likely one


class TaughtRunner(Runner):
    """Runs requests whose output is known."""

    def __init__(self, decoder: Decoder, num_pages: int, page_size: int) -> None:
        super().__init__(decoder, num_pages, page_size)
        self.text_by_request: dict[str, list[int]] = {}
        self.thoughts_by_request: dict[str, list[Thought]] = {}
        self._sampling: list[Sequence] = []

    def prepare(self, chunks: list[Chunk], moves: Moves, saves: Any = ()) -> StepInputs | None:
        self._sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        return super().prepare(chunks, moves, saves)

    def forward(self, inputs: StepInputs | None) -> torch.Tensor:
        """One-hot rows of the texts' next tokens."""
        logits = super().forward(inputs)
        names = [sequence.request.request_id for sequence in self._sampling]
        outputs = [sequence.num_output for sequence in self._sampling]
        wanted = [self.text_by_request[name][index] for name, index in zip(names, outputs, strict=True)]
        chosen = torch.tensor(wanted, dtype=torch.int64)
        thoughts = thoughts_of(logits, chosen)
        for name, thought in zip(names, thoughts, strict=True):
            self.thoughts_by_request.setdefault(name, []).append(thought)
        return torch.nn.functional.one_hot(chosen, self.vocab_size).float()


def thoughts_of(logits: torch.Tensor, wanted: torch.Tensor) -> list[Thought]:
    """logits float32 [S, vocab]; wanted int64 [S]."""
    nats = -logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    return [Thought(*pair) for pair in zip(nats.tolist(), logits.argmax(-1).tolist(), strict=True)]


class Heard(NamedTuple):
    """Of one turn."""

    thoughts: list[Thought]  # of its output
    usage: PromptUsage
    ttft_s: float


class Arm:
    """An engine with a window, over the weights of mneme-tiny in float32, and one way to truncate."""

    def __init__(self, decoder: Decoder, window: int, truncation: Truncation, num_sessions: int) -> None:
        num_pages = 4 * num_sessions * (window // PAGE_SIZE + 2) + 8
        self._runner = TaughtRunner(decoder, num_pages, PAGE_SIZE)
        self._engine = Engine(self._runner, None, EngineConfig(page_size=PAGE_SIZE, max_context=window))
        self._truncation = truncation
        self._num_requests = 0

    def turns(self, prompts: dict[str, list[int]], texts: dict[str, list[int]], *, append: bool = False) -> list[Heard]:
        """A turn of each session, all at once; the answers are the texts.

        prompts  token ids by session; with `append` what is new only
        texts    token ids of the answers by session
        """
        self._num_requests += 1
        names = {session: f"{session}.{self._num_requests}" for session in prompts}
        started = time.perf_counter()
        for session, prompt in prompts.items():
            self._runner.text_by_request[names[session]] = texts[session]
            params = SamplingParams(temperature=0, max_tokens=len(texts[session]), ignore_eos=True, seed=0)
            self._engine.submit(
                GenerationRequest(
                    request_id=names[session],
                    prompt_token_ids=tuple(prompt),
                    sampling=params,
                    session_id=session,
                    truncation=self._truncation,
                    append=append,
                )
            )
        first = self._run(started)
        return [Heard(self._runner.thoughts_by_request.pop(name), *first[name]) for name in names.values()]

    def _run(self, started: float) -> dict[str, tuple[PromptUsage, float]]:
        first: dict[str, tuple[PromptUsage, float]] = {}
        while self._engine.has_work:
            events = self._engine.step()
            now_s = time.perf_counter() - started
            for event in events:
                if event.error is not None:
                    raise MnemeError(f"{event.request_id}: {event.error}")
                if event.usage is not None:
                    first[event.request_id] = (event.usage, now_s)
        return first


def load_decoder(folder: Path, kind: type[Decoder] = Decoder, **options: Any) -> Decoder:
    """A model directory in float32 on the CPU."""
    config = load_model_config(folder)
    return kind(config, load_weights(folder, config, torch.device("cpu"), torch.float32), **options)
