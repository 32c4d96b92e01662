"""What the API shows of all that runs and is kept: sessions, requests, the prefix forest, tiers, replicas, events."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic's condition before Python 3.12

from mneme.cluster.wire.answers import Session, State
from mneme.replicas.queries import Tree
from mneme.replicas.request import KvDetails


class SessionList(TypedDict):
    """Sessions, the one used last first."""

    object: Literal["list"]
    data: list[Session]


class ShownRequest(TypedDict):
    """A request that ended, or was refused behind its admission.

    outcome   a finish reason, the code of an error, or "client_gone"
    trace_id  of its `traceparent`, or of the spans that were made for it
    """

    id: str
    object: Literal["request"]
    path: str
    model: str
    ended_at: float  # seconds since 1970
    outcome: str
    replica: str | None
    trace_id: str | None
    session: bool
    choices: int
    prompt_tokens: int
    completion_tokens: int
    kv_details: KvDetails
    queue_ms: float
    first_token_ms: float | None  # since its body was there
    total_ms: float


class RequestList(TypedDict):
    """Requests that ended at this ingress, the latest first."""

    object: Literal["list"]
    ingress: str
    data: list[ShownRequest]


class ReplicaTree(Tree):
    replica: str
    texts: list[str]  # how each run begins; empty for sums over tenants


class KvTree(TypedDict):
    """The prefix forest of each replica."""

    object: Literal["kv.tree"]
    replicas: list[ReplicaTree]


class TierOccupancy(TypedDict):
    """Tokens of KV; of a node's tiers, bytes.

    cached       that nobody uses now, and that eviction may take
    token_bytes  of a token's KV, where tokens are counted
    """

    replica: NotRequired[str]
    node: NotRequired[str]
    tier: Literal["device", "host", "node memory", "node disk"]
    unit: Literal["tokens", "bytes"]
    in_use: int
    cached: int
    total: int | None
    token_bytes: NotRequired[float]


class KvMoves(TypedDict):
    """Bytes of KV that went from tier to tier since replicas and nodes started; what is loaded passes host memory."""

    device_to_host: int
    host_to_device: int
    host_to_disk: int
    disk_to_host: int
    peers_to_host: int


class SavedPrefill(TypedDict):
    """Prompt tokens that were found, of all requests that ended at this ingress.

    since  seconds since 1970, as asked for or when the ingress started; tokens are counted by the quarter of an hour
    """

    since: float
    tokens: int


class KvTiers(TypedDict):
    """What each tier holds, and the tokens of prompts by where their KV came from since the replicas started."""

    object: Literal["kv.tiers"]
    tiers: list[TierOccupancy]
    moved_bytes: KvMoves
    prompt_tokens: dict[str, int]
    saved: SavedPrefill


class ShownReplica(TypedDict):
    replica: str
    model: str
    device: str | None
    age_s: float  # since it said all this
    running: int
    waiting: int
    backlog_s: float | None
    kv_usage: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


class ModelState(TypedDict):
    model: str
    state: State
    reason: str
    ready: int
    wanted: int | None


class Cluster(TypedDict):
    """Models, replicas and nodes."""

    object: Literal["cluster"]
    ingress: str
    models: list[ModelState]
    replicas: list[ShownReplica]
    nodes: list[dict[str, Any]]


class Event(TypedDict):
    """One event; `data` has fields by its type.

    request.ended  a `ShownRequest`
    replica.state  `model`, `state`, `reason`, `ready`: when any of them changed
    replica.came   `model`, `replica`: Serve has started it; `replica.state` says when more are ready
    replica.left   likewise: it was drained, replaced or lost
    kv.moved       tokens or pages since the event before, by counter; for admins, and where there are no keys
    fault          likewise what went wrong with KV, nodes of the cache tier and graphs, by the labels of its metric
    lost           `events` that this listener was too slow for
    """

    type: Literal["request.ended", "replica.state", "replica.came", "replica.left", "kv.moved", "fault", "lost"]
    at: float
    data: dict[str, Any]
