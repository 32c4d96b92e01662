"""Names that processes and rooms say to each other: tenants, tiers, edges, policies, what became of a chunk or a log.

The values are names of counters and of the configuration. Nothing is imported, so that whoever shows a counter needs
nothing of what counts.
"""

from __future__ import annotations

from enum import Enum
from hashlib import blake2b
from typing import Literal

PUBLIC_SALT = "*"  # no tenant's: every tenant's prompts may begin with what was computed under it
TENANT_BYTES = 8
MAX_CHUNK_TOKENS = 4096

TierName = Literal["host", "disk"]
Edge = Literal["host", "disk", "peer_host", "peer_disk"]  # where bytes come from, as rates are measured
EDGES: tuple[Edge, ...] = ("host", "disk", "peer_host", "peer_disk")
CostEdge = Edge | Literal["save", "lookup"]
COST_EDGES: tuple[CostEdge, ...] = (*EDGES, "save", "lookup")
NodePolicyName = Literal["lru", "pensieve", "lookahead", "returning"]
EvictionPolicyName = Literal[NodePolicyName, "density"]  # of an engine's own pages; of two tiers each would learn alone


class Miss(Enum):
    """Says why a chunk cannot be had: a recompute, never an error."""

    ABSENT = "absent"  # never there, evicted, or deleted by someone else
    BUSY = "busy"  # this time: too many open files, no memory; the file may be sound
    IO_ERROR = "io_error"
    NOT_OURS = "not_ours"  # a link, not a plain file, or another user's
    SHORT = "short"  # the file ends before what it says it holds, or ended while it was read
    NO_HEADER = "no_header"
    OTHER_VERSION = "other_version"
    BAD_HEADER = "bad_header"  # the header's checksum is wrong, or what it says is absurd
    OTHER_KEY = "other_key"
    OTHER_MODEL = "other_model"
    OTHER_TOKENS = "other_tokens"
    BAD_CHECKSUM = "bad_checksum"  # of a layer


class HostPut(Enum):
    """Says what became of a chunk that was given."""

    TAKEN = "taken"
    KEPT = "kept"  # it was there, or is about to be
    TO_DISK = "to_disk"  # not worth what would go for it in memory
    REFUSED = "refused"


class Appended(Enum):
    """Says what became of a session log's rows."""

    WRITTEN = "appended"
    NEEDS_WHOLE = "needs_whole"  # the log is not what they go on from: send all of them
    STALE = "stale"  # the session went on, or was deleted, elsewhere
    FAILED = "append_failed"  # the log is as before


def tenant_of(salt: str) -> str:
    """A tenant's own salt, which begins all others of that tenant, up to a colon."""
    return salt.partition(":")[0]


def tenant_id(salt: str) -> bytes:
    """Return what files say of the tenant that they belong to: the same under all salts of the tenant."""
    return blake2b(
        tenant_of(salt).encode("utf-8", "surrogatepass"), digest_size=TENANT_BYTES, person=b"mneme owner"
    ).digest()
