"""Prompts that are computed before traffic and stay resident until they are unpinned (RelayAttention 3.3).

A prompt is warmed by a request like any other, of one output token that nobody hears of; when it ends, in the same
step, its pages are pinned. Pins belong to a tenant, have a life of their own, and are bounded: in number per tenant,
and in pages, so that what was taken can end and half of the pool is left to requests. Pins that a failed step took
with it are warmed again.

A pin ends no request: one that named `max_tokens` gets them. One that did not gets what there is: it needs room for one
token more, and a pin lowers what it may have. A turn that is queued behind its own session may find as much history as
the turns before it can leave. What it comes to is then bounded by the capacity that it was taken under.

What the configuration names is public, as is what an admin warms so: computed once, and shared by all tenants.

Policy only: no tensors.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from mneme.cachetier.names import PUBLIC_SALT, tenant_id
from mneme.cachetier.pin_book import PinBook, PinName
from mneme.errors import InvalidRequest, MnemeError, PinRefused
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.paths import Path
from mneme.replicas.queries import KnownPin, PinnedPrompt
from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.replicas.schedule.scheduler import Scheduler
from mneme.replicas.sequence import End, Sequence
from mneme.replicas.sessions.sessions import Sessions
from mneme.replicas.sessions.token_log import TokenLog, turn_name

logger = logging.getLogger(__name__)

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, seed=0)
MAX_PINS = 16  # of one API key, besides what the configuration names
_PINNED_SHARE = 0.5  # of the pages, at most, in all pins together
_OUTCOME_S = 60.0  # how long the outcome of what is not pinned can be asked for


@dataclass(slots=True, eq=False, kw_only=True)
class _Entry:
    name: PinName
    salt: str
    ids: tuple[int, ...]
    keeps: bool  # False: computed only, not pinned
    is_configured: bool
    expires_at_s: float
    path: Path | None = None  # once it is pinned
    is_warming: bool = True
    is_mark: bool = False  # of a request that kept a part of its prompt: makes room for others of its tenant
    error: MnemeError | None = None

    @property
    def request_id(self) -> str:
        return f"warm-{self.name.tenant.hex()}-{self.name.pin_id}"

    @property
    def is_listed(self) -> bool:
        return self.keeps and self.error is None


class Pins:
    """Keeps the pins of one engine; called on its thread."""

    def __init__(
        self,
        forest: PrefixForest,
        scheduler: Scheduler,
        sessions: Sessions,
        *,
        max_context: int,
        submit: Callable[[GenerationRequest], None],
        abort: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """`submit` and `abort` run and end the requests that compute prompts; of `max_context` tokens at most."""
        self._forest, self._scheduler, self._sessions = forest, scheduler, sessions
        self._max_context, self._submit, self._abort = max_context, submit, abort
        self.max_pins = MAX_PINS
        num_pages = forest.stats()["pages"]["total"]
        self._num_kept_tokens = int(num_pages * (1 - _PINNED_SHARE)) * forest.page_size
        self._entries = PinBook[_Entry](clock)
        self._entry_by_request: dict[str, _Entry] = {}  # those that are being computed

    def warm(
        self,
        name: PinName,
        salt: str,
        ids: tuple[int, ...],
        *,
        ttl_s: float | None = None,
        keeps: bool = True,
        is_configured: bool = False,
    ) -> None:
        """Begin to compute a prompt, to be pinned then (`keeps`); `describe` says how far it is.

        Raises `InvalidRequest` (`PinRefused` and `ContextLengthExceeded` among them) or `Overloaded`.
        """
        self.expire()
        if name in self._entries:
            raise InvalidRequest("pin_id", name.pin_id, "a pin of this name exists")
        if keeps and not is_configured:
            self._check_quota(name.tenant)
        if keeps:
            self._forest.check_pin(salt, list(ids), num_kept_tokens=self._num_needed(self._num_kept_tokens))
        end_s = self._entries.end_s(ttl_s)
        entry = _Entry(name=name, salt=salt, ids=ids, keeps=keeps, is_configured=is_configured, expires_at_s=end_s)
        self._compute(entry)
        self._entries[name] = entry

    def ended(self, end: End) -> None:
        """Pin what a request that has ended was sent to compute, or keeps of its prompt."""
        entry = self._entry_by_request.pop(end.sequence.request.request_id, None)
        if entry is not None:
            self._computed(entry, end)
        if end.sequence.request.pinned and end.is_sound:
            self._keep(end.sequence)

    def _computed(self, entry: _Entry, end: End) -> None:
        entry.is_warming = False
        if end.reason in ("error", "abort"):
            refusal = end.error if isinstance(end.error, MnemeError) else None
            self._fail(entry, refusal or MnemeError("the engine failed; the prompt was not computed"))
        elif entry.keeps:
            try:
                entry.path = self.pin_prefix(entry.salt, list(entry.ids), self._num_kept_tokens)
            except PinRefused as refusal:
                self._fail(entry, refusal)
        else:
            entry.expires_at_s = self._entries.end_s(_OUTCOME_S)

    def _keep(self, sequence: Sequence) -> None:
        """Pin what a request that has ended keeps of its prompt, as far as there is room; refuses nothing.

        A pin of the same tenant that the prompt goes on from, and that ends no later, is replaced.
        """
        request = sequence.request
        if sequence.context is not sequence.ids or sequence.root is not None:
            return  # what is seen is not what was said, or not exact
        self.expire()
        for num_tokens, ttl_s in request.pinned:
            ids = _agreeing(sequence.ids, request.prompt_token_ids[:num_tokens])
            if ids:
                self._mark(request.salt, ids, self._entries.end_s(ttl_s))

    def _mark(self, salt: str, ids: tuple[int, ...], end_s: float) -> None:
        digest = hashlib.blake2b(salt.encode() + array("i", ids).tobytes(), digest_size=12).hexdigest()
        name = PinName(tenant_id(salt), f"mark-{digest}")
        marks = {each: entry for each, entry in self._entries.of_tenant(name.tenant).items() if entry.is_mark}
        known = marks.pop(name, None)
        if known is not None:
            known.expires_at_s = max(known.expires_at_s, end_s)
            return
        for other, entry in list(marks.items()):
            if entry.salt == salt and entry.expires_at_s <= end_s and ids[: len(entry.ids)] == entry.ids:
                self._remove(marks.pop(other))
        try:
            if marks and self._num_own(name.tenant) >= self.max_pins:
                self._remove(min(marks.values(), key=lambda entry: entry.expires_at_s))
            self._check_quota(name.tenant)
            path = self.pin_prefix(salt, list(ids), self._num_kept_tokens)
        except InvalidRequest as refusal:
            logger.debug("mark not pinned: %s", refusal)
            return
        self._entries[name] = _Entry(
            name=name,
            salt=salt,
            ids=ids,
            keeps=True,
            is_configured=False,
            expires_at_s=end_s,
            path=path,
            is_warming=False,
            is_mark=True,
        )

    def expire(self) -> None:
        """Remove pins that are over their time."""
        for name in self._entries.over():
            self._remove(self._entries[name])

    def renew(self) -> None:
        """Compute again what a failed step took."""
        for entry in list(self._entries.values()):
            if entry.path is not None and not entry.path.pages:
                entry.path, entry.is_warming = None, True
                try:
                    self._compute(entry)
                except MnemeError as error:
                    self._fail(entry, error)

    def unpin(self, name: PinName) -> bool:
        """Unpin a prompt, or cancel one that is being warmed; returns whether there was one."""
        entry = self._entries.get(name)
        if entry is None:
            return False
        if entry.is_configured:
            raise InvalidRequest("pin_id", name.pin_id, "is part of the configuration, and stays")
        self._remove(entry)
        return True

    def describe(self, name: PinName) -> KnownPin | None:
        """Describe an entry, also one that failed: `error` is then a `MnemeError`."""
        self.expire()
        entry = self._entries.get(name)
        return None if entry is None else self._described(entry)

    def of_tenant(self, tenant: bytes) -> list[KnownPin]:
        """List what the tenant has pinned, or is about to have."""
        self.expire()
        return [self._described(each) for each in self._entries.of_tenant(tenant).values() if each.is_listed]

    def _described(self, entry: _Entry) -> KnownPin:
        pin: PinnedPrompt = {
            "id": entry.name.pin_id,
            "num_tokens": len(entry.ids),
            "pinned": entry.path is not None,
            "configured": entry.is_configured,
            "public": entry.salt == PUBLIC_SALT,
            "expires_in_s": self._entries.left_s(entry) if entry.keeps else None,
        }
        return KnownPin(pin, entry.is_warming, entry.error)

    def pin_prefix(self, salt: str, ids: list[int], num_kept_tokens: int = 0) -> Path:
        """Keep what is resident of a prefix, leaving room for so many tokens at least.

        Raises `PinRefused` if that is too much, or if a request that was taken might then never fit.
        """
        return self._scheduler.pin(salt, ids, num_kept_tokens=self._num_needed(num_kept_tokens))

    def _num_needed(self, num_tokens: int) -> int:
        """Count the tokens that must find room beside pins: so many, and what each request that was taken may need."""
        started = [*self._scheduler.gathering, *self._scheduler.waiting, *self._scheduler.running]
        capacity = min(self._max_context, self._forest.capacity)
        queued = _num_queued_tokens(self._sessions, started, capacity)
        return max([num_tokens, queued, *map(_num_needed_tokens, started)])

    def _check_quota(self, tenant: bytes) -> None:
        num_own = self._num_own(tenant)
        if num_own >= self.max_pins:
            raise InvalidRequest("pin", num_own, f"an API key may have {self.max_pins} pins at once")

    def _num_own(self, tenant: bytes) -> int:
        return sum(each.is_listed and not each.is_configured for each in self._entries.of_tenant(tenant).values())

    def _compute(self, entry: _Entry) -> None:
        request = GenerationRequest(
            request_id=entry.request_id, prompt_token_ids=entry.ids, sampling=ONE_TOKEN, salt=entry.salt
        )
        self._submit(request)
        self._entry_by_request[entry.request_id] = entry

    def _fail(self, entry: _Entry, error: MnemeError) -> None:
        logger.warning("pin_id=%s not pinned: %s", entry.name.pin_id, error)
        entry.error, entry.is_warming = error, False
        entry.expires_at_s = self._entries.end_s(_OUTCOME_S)

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.name]
        if entry.path is not None:
            self._scheduler.unpin(entry.path)
        elif self._entry_by_request.pop(entry.request_id, None) is not None:
            self._abort(entry.request_id)


def _agreeing(ids: list[int], given: tuple[int, ...]) -> tuple[int, ...]:
    """Return what a prompt's ids have in common with those that the request named: its session may have others."""
    num = next((i for i, (own, other) in enumerate(zip(ids, given, strict=False)) if own != other), None)
    return given[: min(len(ids), len(given)) if num is None else num]


def _num_needed_tokens(sequence: Sequence) -> int:
    """Count the tokens that a started request must be able to have."""
    params = sequence.request.sampling
    num_output = sequence.max_tokens
    if params.max_tokens is None:
        num_output = max(sequence.num_output + 1, min(params.min_tokens, sequence.max_tokens))
    num_tokens = sequence.num_prompt - sequence.view.num_unseen + num_output
    return sequence.view.num_fitting(num_tokens)


def _num_queued_tokens(sessions: Sessions, started: Iterable[Sequence], capacity: int) -> int:
    """Count what the longest turn may need that waits behind its own session; 0 if none waits."""
    sequence_by_id = {sequence.request.request_id: sequence for sequence in started}
    logs = sessions.queued.logs
    return min(max((_num_behind(log, sequence_by_id, capacity) for log in logs), default=0), capacity)


def _num_behind(log: TokenLog, sequence_by_id: Mapping[str, Sequence], capacity: int) -> int:
    assert log.running is not None, "a turn waits for another"
    answering = [sequence_by_id[name] for name in log.running.answering if name in sequence_by_id]
    history = max([len(log.ids), *(sequence.num_prompt + sequence.max_tokens for sequence in answering)])
    needed = 0
    for _, choices in groupby(log.running.queue, turn_name):
        turn = list(choices)
        prompts = [_num_prompt(request, history) for request in turn]
        for num_prompt, request in zip(prompts, turn, strict=True):
            params = request.sampling
            needed = max(needed, num_prompt + (params.max_tokens or max(params.min_tokens, 1)))
        limit = turn[0].sampling.max_tokens
        history = max(history, capacity if limit is None else prompts[0] + limit)
    return needed


def _num_prompt(request: GenerationRequest, num_history: int) -> int:
    """Count prompt tokens; text may be matched to the ids of the history, which may be more than its own."""
    is_matched = request.append or request.prompt_text is not None
    return len(request.prompt_token_ids) + (num_history if is_matched else 0)
