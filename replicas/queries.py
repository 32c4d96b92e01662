"""What may be asked of an engine about sessions, prompts and KV that is kept: a class for each question.

`Query[R]` is answered with an `R`: plain values, safe to send between processes. `engine/commands.py` answers. What
engines say of the cache tier is None where there is none.

Torch-free and Ray-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NamedTuple, NotRequired, TypeVar

from typing_extensions import TypedDict  # pydantic's condition before Python 3.12

from mneme.cachetier.names import TierName
from mneme.cachetier.pin_book import PinName
from mneme.errors import MnemeError
from mneme.replicas.documents import ShownBlend
from mneme.replicas.report import ReplicaReport
from mneme.replicas.request import KvDetails, SessionKey, Source

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Query(Generic[R_co]):
    """A question that is answered with an `R_co`."""

    lane: ClassVar[Literal["kv", "lists"] | None] = None  # where it waits for others alike: it may take long


@dataclass(frozen=True, slots=True)
class KvQuery(Query[R_co]):
    """A question about KV, which the cache tier may have to be asked for."""

    lane: ClassVar[Literal["kv", "lists"] | None] = "kv"


@dataclass(frozen=True, slots=True)
class ListQuery(Query[R_co]):
    """A question of people who look at what there is, perhaps again and again."""

    lane: ClassVar[Literal["kv", "lists"] | None] = "lists"


class SessionKv(TypedDict):
    """Tokens by where their KV is on the session's replica; what is absent there the cache tier may have."""

    device: int
    host: int
    absent: int


class Hits(TypedDict):
    prompt_tokens: int
    cached_tokens: int


class SessionFigures(TypedDict):
    tokens: int
    truncated: int
    turns: int
    answering: bool
    queued: int
    idle_s: float
    expires_in_s: float
    kv: SessionKv
    hit_history: list[Hits]
    forked_from: str | None


class KnownSession(SessionFigures):
    version: int  # of its durable log; not shown


@dataclass(frozen=True, slots=True)
class GetSession(Query[KnownSession | None]):
    """Describe a session, or None; `restores`: from its durable log, where nothing newer is known of it."""

    key: SessionKey
    restores: bool = False


class ListedSession(KnownSession):
    key: SessionKey


@dataclass(frozen=True, slots=True)
class ListSessions(ListQuery[list[ListedSession]]):
    """Describe the sessions that a tenant used last, the latest first; `salt`: any of the tenant's."""

    salt: str
    limit: int


@dataclass(frozen=True, slots=True)
class DeleteSession(Query[bool]):
    """Delete a session and its log; whether there was one. Raises `ReplicaUnavailable` if the log takes too long."""

    key: SessionKey


@dataclass(frozen=True, slots=True)
class LeaveSession(Query[bool]):
    """Forget a session that goes on on another replica, with its durable log; whether there was one."""

    key: SessionKey


@dataclass(frozen=True, slots=True)
class ForkSession(Query[KnownSession | None]):
    """Fork a session and describe the new one, whose id is namespaced as all are here. Raises `SessionNotFound`."""

    key: SessionKey
    new_id: str


@dataclass(frozen=True, slots=True)
class SetNote(Query[bool]):
    """Keep an API's bytes with an idle session, and wait until its log has them; whether there is such a session."""

    key: SessionKey
    note: bytes


@dataclass(frozen=True, slots=True)
class GetNote(Query[bytes | None]):
    """Return what an API keeps with a session, empty if nothing; None: there is no such session."""

    key: SessionKey


class SessionTokens(NamedTuple):
    ids: tuple[int, ...]
    event: bytes  # under which the cache tier may have KV that is the session's alone; empty: their KV is anybody's


@dataclass(frozen=True, slots=True)
class GetTokens(Query[SessionTokens | None]):
    """List a session's token ids, or None: `visible` those that its next turn would look for, else all."""

    key: SessionKey
    visible: bool


@dataclass(frozen=True, slots=True)
class GetReport(Query[ReplicaReport]):
    """Report all that is there, for who has missed some."""


class ExplainedRange(TypedDict):
    """Positions from `start` up to `end`, without it."""

    start: int
    end: int
    source: Source


class ExplainedSampling(TypedDict):
    """How tokens are drawn: as the request says, else the model, else neutral."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_tokens: int


class ExplainedPrompt(TypedDict):
    """One choice of a request.

    resumed_at    tokens of its answer that another replica had said before it came here
    suspended_at  tokens of its answer that there were when it gave way to earlier requests, the first 64 times
    """

    request_id: str
    choice: int
    has_session: bool
    prompt_tokens: int
    kv_details: KvDetails
    ranges: list[ExplainedRange]
    sampling: ExplainedSampling
    resumed_at: int
    suspended_at: list[int]
    blend: NotRequired[ShownBlend]


@dataclass(frozen=True, slots=True)
class ExplainPrompt(Query[list[ExplainedPrompt]]):
    """Say where a request's KV came from, for each choice; an empty list if it is not remembered."""

    salt: str
    http_id: str


class PinnedPrompt(TypedDict):
    id: str
    num_tokens: int
    pinned: bool
    configured: bool
    public: bool
    expires_in_s: float | None


class KnownPin(NamedTuple):
    pin: PinnedPrompt
    warming: bool  # it is being computed
    error: MnemeError | None  # why it could not be


@dataclass(frozen=True, slots=True)
class ComputePrompt(Query[KnownPin | None]):
    """Begin to compute a prompt, to be pinned then (`pin`); answers as `GetPin`."""

    name: PinName
    salt: str
    token_ids: tuple[int, ...]
    ttl_s: float | None
    pin: bool


@dataclass(frozen=True, slots=True)
class GetPin(Query[KnownPin | None]):
    """Say how far a prompt is that is warmed or pinned, or None."""

    name: PinName


@dataclass(frozen=True, slots=True)
class ListPins(Query[list[KnownPin]]):
    """List what a tenant has pinned, or is about to have."""

    tenant: bytes


@dataclass(frozen=True, slots=True)
class DeletePin(Query[bool]):
    """Unpin; whether there was such a pin."""

    name: PinName


class FoundPages(TypedDict):
    """Leading tokens of a sequence that an engine's device and host have."""

    device: int
    host: int


@dataclass(frozen=True, slots=True)
class LookUpPages(KvQuery[FoundPages]):
    """Count the tokens of a sequence, or of what its session sees, that the engine's device and host have."""

    salt: str
    token_ids: tuple[int, ...]
    session: SessionKey | None = None


class FoundOnNode(TypedDict):
    node: str
    host: int
    disk: int


class FoundChunk(TypedDict):
    start: int
    tokens: int
    bytes: int
    tier: TierName
    node: str


class FoundInTier(TypedDict):
    """Leading tokens of a sequence in the cache tier."""

    tokens: int
    host: int
    disk: int
    peer: int
    nodes: list[FoundOnNode]
    chunks: NotRequired[list[FoundChunk]]  # shown where they were asked for


@dataclass(frozen=True, slots=True)
class LookUpKv(KvQuery[FoundInTier | None]):
    """Say what the tier has of a sequence, or of what is its session's alone since an event; changes nothing."""

    salt: str
    token_ids: tuple[int, ...]
    session: SessionKey | None = None
    event: bytes = b""


class PinnedChunks(TypedDict):
    id: str
    num_tokens: int
    num_chunks: int
    num_bytes: int
    expires_in_s: float | None


@dataclass(frozen=True, slots=True)
class PinKv(KvQuery[PinnedChunks]):
    """Keep what the tier has of a sequence; raises `KvNotFound`, `CachePinRefused` or `NoCacheTier`."""

    name: PinName
    salt: str
    token_ids: tuple[int, ...]
    ttl_s: float | None
    session: SessionKey | None = None
    event: bytes = b""


@dataclass(frozen=True, slots=True)
class UnpinKv(KvQuery[bool | None]):
    """Unpin in the tier; whether there was such a pin."""

    name: PinName


@dataclass(frozen=True, slots=True)
class ListKvPins(KvQuery[list[PinnedChunks] | None]):
    """List a tenant's pins in the tier."""

    tenant: bytes


class Run(TypedDict):
    """Pages of the prefix forest of which each is the only child of the one before, as one node of a tree.

    parent    index of the run that it follows, which stands before it; -1: it begins a lineage
    start     position of its first token
    below     tokens of this run and of all that follows it, also of what is not listed
    device, host  tokens that the device has, and those that only host memory has
    running   requests that use it, or what follows it, now
    sessions  whose last turn ends here
    uses      requests that have used its first page
    first_ids of its tokens; empty where they are another tenant's
    """

    parent: int
    start: int
    tokens: int
    below: int
    device: int
    host: int
    running: int
    pinned: bool
    sessions: int
    uses: int
    idle_s: float
    kind: Literal["prompt", "truncated", "documents"]
    first_ids: list[int]


class Tree(TypedDict):
    runs: list[Run]
    num_runs: int  # with those that are not listed
    num_tokens: int


@dataclass(frozen=True, slots=True)
class GetTree(ListQuery[Tree]):
    """Show the prefix forest as runs, parents first, the largest where there are too many.

    salt        whose KV: all salts of its tenant; None: everybody's, without token ids
    depth       runs behind each other, at most
    min_tokens  runs with fewer, together with what follows them, are left out
    max_runs    that are listed
    """

    salt: str | None
    depth: int
    min_tokens: int
    max_runs: int


class DroppedPages(TypedDict):
    device_pages: int
    host_pages: int


class DroppedChunks(TypedDict):
    chunks: int
    bytes: int
    session_logs: NotRequired[int]  # of a tenant


@dataclass(frozen=True, slots=True)
class DeleteSequencePages(KvQuery[DroppedPages]):
    """Delete a prompt's pages with all that begins with it, or what is a session's own; saves are flushed before."""

    salt: str
    token_ids: tuple[int, ...]
    session: SessionKey | None = None


@dataclass(frozen=True, slots=True)
class DeleteTenantPages(KvQuery[DroppedPages]):
    """Delete all pages and sessions of a tenant; a session that answers is deleted when it has."""

    salt: str


@dataclass(frozen=True, slots=True)
class FlushSaves(KvQuery[None]):
    """Wait until what is being saved is in the tier."""


@dataclass(frozen=True, slots=True)
class DeleteKv(KvQuery[DroppedChunks | None]):
    """Delete the tier's chunks of a sequence, with all that begins with it; of a session, what is its alone."""

    salt: str
    token_ids: tuple[int, ...]
    session: SessionKey | None = None


@dataclass(frozen=True, slots=True)
class DeleteTenantKv(KvQuery[DroppedChunks | None]):
    """Delete all that a tenant has in the tier; its logs first: a session read from one would be saved again."""

    salt: str


class TenantKv(TypedDict):
    owner: str
    host_bytes: int
    disk_bytes: int
    quota_bytes: int | None  # in each tier of each node
    pins: list[PinnedChunks]


class TierFigures(TypedDict):
    nodes: list[dict[str, Any]]


class KvFigures(TierFigures):
    tenant: TenantKv | None


@dataclass(frozen=True, slots=True)
class GetKvStats(KvQuery[KvFigures | None]):
    """Sum up all tenants, and the caller's own share; without a salt, totals alone."""

    salt: str | None
