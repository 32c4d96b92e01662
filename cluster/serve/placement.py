"""A generation's choices on one replica, and what is left to do when that replica is lost."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from mneme.cluster.serve.link import LinkLost, ReplicaLink, Sink
from mneme.errors import DeadlineExceeded, MnemeError
from mneme.replicas.request import GenerationRequest, PromptUsage, TokenEvent
from mneme.router.chooser import Reservation


@dataclass(slots=True)
class PlacedChoice:
    """One request of a generation, and what the client already has of it."""

    request: GenerationRequest
    attempt: int = 0
    emitted: list[int] = field(default_factory=list)
    usage: PromptUsage | None = None
    is_finished: bool = False
    clock: Callable[[], float] = time.monotonic
    _deadline_s: float = inf  # of this process's clock: others differ

    def __post_init__(self) -> None:
        if self.request.timeout_s is not None:
            self._deadline_s = self.clock() + self.request.timeout_s

    @property
    def time_left_s(self) -> float:
        return self._deadline_s - self.clock()

    @property
    def attempt_id(self) -> str:
        """The request id at the replica; a turn's choices keep their common stem and their suffix."""
        request_id = self.request.request_id
        if not self.attempt:
            return request_id
        suffix = f".{self.request.choice_index}"
        stem = request_id.removesuffix(suffix)
        return f"{stem}~{self.attempt}{suffix if stem != request_id else ''}"

    def take(self, event: TokenEvent) -> TokenEvent:
        """Note an event; what goes on to the client has the usage once, as of the first submit."""
        self.emitted.extend(event.token_ids)
        self.is_finished = event.finish_reason is not None
        usage = event.usage if self.usage is None else None
        self.usage = self.usage or event.usage
        return event._replace(request_id=self.request.request_id, usage=usage)

    def remaining(self) -> GenerationRequest:
        """What is still to be done, as a request of its own; raises `DeadlineExceeded`."""
        time_left_s = self.time_left_s
        if time_left_s <= 0:
            raise DeadlineExceeded
        sampling, num_emitted = self.request.sampling, len(self.emitted)
        if num_emitted:
            left = None if sampling.max_tokens is None else sampling.max_tokens - num_emitted
            sampling = replace(sampling, max_tokens=left, min_tokens=max(sampling.min_tokens - num_emitted, 0))
        return replace(
            self.request,
            request_id=self.attempt_id,
            prompt_token_ids=(*self.request.prompt_token_ids, *self.emitted),
            timeout_s=None if time_left_s == inf else time_left_s,
            output_offset=num_emitted,
            sampling=sampling,
        )

    def is_complete(self) -> bool:
        """All tokens came, only the word that it has finished was lost."""
        max_tokens = self.request.sampling.max_tokens
        return max_tokens is not None and len(self.emitted) >= max_tokens


@dataclass(slots=True, eq=False)
class Placement:
    """Choices running on one replica."""

    link: ReplicaLink
    reservation: Reservation
    sink: Sink
    choices: dict[str, PlacedChoice]

    async def events(self) -> AsyncGenerator[TokenEvent, None]:
        """Events until each choice has finished; raises `LinkLost`."""
        while not all(choice.is_finished for choice in self.choices.values()):
            item = await self.sink.get()
            if isinstance(item, LinkLost):
                raise item
            if item.finish_reason == "abort":  # not by us, who would not listen any more: the replica is stopping
                raise LinkLost("the replica ended the request")
            self.reservation.started()
            yield self.choices[item.request_id].take(item)

    def end(self) -> None:
        """Give the reservation back and abort what still runs; never awaits."""
        self.reservation.release()
        self.link.abort([request_id for request_id, c in self.choices.items() if not c.is_finished])


def failures(choices: Sequence[PlacedChoice], error: MnemeError) -> list[TokenEvent]:
    return [TokenEvent(choice.request.request_id, (), "error", None, None, str(error), error) for choice in choices]
