"""What a request's parameters and the model's own ends mean for its sequence: what it draws from, and when it ends."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mneme.replicas.engine.admission import max_output_tokens, stop_stream
from mneme.replicas.forest.nodes import Owner
from mneme.replicas.model.sampler import SampleRow
from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.replicas.sequence import Chunk, Sequence
from mneme.replicas.sessions.token_log import FinishedTurn, Said, Seen, TurnPrompt
from mneme.replicas.text.detokenizer import TextStream
from mneme.replicas.token_counts import TokenCounts

if TYPE_CHECKING:
    from mneme.replicas.text.tokenizer import Tokenizer


class Decoding:
    """Holds nothing of any request."""

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a text that goes on where another ended."""
        assert self._tokenizer is not None, "only requests with text match by text"
        return self._tokenizer.encode_continuation(text)

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens included."""
        assert self._tokenizer is not None, "only requests with text match by text"
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def begin(
        self, request: GenerationRequest, prompt: TurnPrompt, owner: Owner | None, *, capacity: int, arrival: int
    ) -> Sequence:
        """The sequence of a request; raises as `max_output_tokens` and `stop_stream` do."""
        ids = prompt.ids
        sequence = Sequence(
            request=request,
            owner=owner,
            ids=ids,
            num_prompt=len(ids),
            max_tokens=max_output_tokens(request, len(prompt.context), capacity),
            arrival=arrival,
            context=prompt.context,
            root=prompt.root if request.truncation is not None and request.truncation.strategy == "reuse_kv" else None,
            window=None if request.truncation is None else capacity,
            num_history=prompt.num_history,
            stop_text=stop_stream(request, self._tokenizer),
        )
        if request.sampling.repetition_penalty != 1.0:
            sequence.seen = TokenCounts(ids)
        if request.sampling.presence_penalty or request.sampling.frequency_penalty:
            sequence.drawn = TokenCounts(sequence.output_ids)
        return sequence

    def sample_rows(self, chunks: Iterable[Chunk]) -> list[SampleRow]:
        """How the next token of each sequence is drawn whose last known token is in this step."""
        return [self._sample_row(chunk.sequence) for chunk in chunks if chunk.samples]

    def finish_reason(self, sequence: Sequence, token_id: int) -> str | None:
        """Why the sequence ends with this token, which it has appended; None if it does not."""
        if sequence.stop_text is not None:
            sequence.stop_text.push([token_id])
            if sequence.stop_text.stopped:
                return "stop"
        if token_id in self._end_ids(sequence):
            return "stop"
        return "length" if sequence.num_output >= sequence.max_tokens else None

    def turn(self, sequence: Sequence) -> FinishedTurn:
        """What the sequence leaves to its session if it ends now."""
        said = None
        if self._tokenizer is not None and sequence.request.prompt_text is not None:
            said = said_to_client(self._tokenizer, sequence.request.sampling, sequence.output_ids, sequence.stop_text)
        seen = None if sequence.context is sequence.ids else Seen(array("i", sequence.context), sequence.root)
        return FinishedTurn(
            sequence.ids, sequence.num_prompt, sequence.usage.cached_tokens, said, seen, sequence.num_unseen
        )

    def _sample_row(self, sequence: Sequence) -> SampleRow:
        request = sequence.request
        params = request.sampling
        barred = self._end_ids(sequence) if sequence.num_output < params.min_tokens else ()
        return SampleRow(
            params=params,
            seed=params.seed or 0,
            choice_index=request.choice_index,
            position=request.output_offset + sequence.num_output,
            barred_ids=barred,
            seen=sequence.seen,
            drawn=sequence.drawn,
        )

    def _end_ids(self, sequence: Sequence) -> tuple[int, ...]:
        params = sequence.request.sampling
        return (*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids))


def said_to_client(tokenizer: Tokenizer, params: SamplingParams, ids: list[int], stream: TextStream | None) -> Said:
    """The text of an answer of these ids as its client got it, and how many of the ids stand for it.

    A last token that is not shown is not counted: it closes the answer, the next prompt's template writes it again, and
    its KV was never computed. Where a stop string cut the text, the ids are counted whose text lies wholly before it.

    stream  was pushed the same ids; None if there are no stop strings
    """

    def text(num_ids: int) -> str:
        return tokenizer.decode(ids[:num_ids], skip_special_tokens=params.skip_special_tokens)

    if stream is not None and stream.stopped:
        return Said(text(stream.num_whole_tokens), stream.num_whole_tokens)
    is_closed = params.skip_special_tokens and bool(ids) and ids[-1] in tokenizer.special_token_ids
    return Said(text(len(ids)), len(ids) - is_closed)
