"""Who is calling, and which KV and which sessions that caller may reach.

A tenant is an API key; without configured keys there is one, "public". The salt that separates tenants' KV is
derived here from the key: a client's `cache_salt` can only narrow what it shares, never reach another tenant.
"""

from __future__ import annotations

import hashlib

from mneme.cachetier.names import tenant_id
from mneme.errors import InvalidRequest

PUBLIC = "public"  # the only tenant where there are no API keys
MAX_SESSION_ID_CHARS = 256
RESPONSE_PREFIX = "resp_"  # of a response's id, which is the name of its session


def tenant_of_secret(sha256: str) -> str:
    """Name the tenant whose secret has this hash."""
    return _digest("tenant", sha256)


def kv_salt(tenant: str, cache_salt: str | None) -> str:
    """The root of the prefix forest that a request may share with; `names.tenant_of` it is the tenant's own salt."""
    own = "" if tenant == PUBLIC else tenant
    if cache_salt is None:
        return own
    if not cache_salt:
        raise InvalidRequest("cache_salt", None, "must not be empty")
    return f"{own}:{_digest('salt', tenant, cache_salt)}"


def kv_tenant(tenant: str) -> bytes:
    """Return what engines and the cache tier call a tenant, whatever salts its requests name."""
    return tenant_id(kv_salt(tenant, None))


def session_key(tenant: str, session_id: str, field: str = "session_id") -> str:
    """A session's name within its tenant; opaque, never part of a path."""
    if not 1 <= len(session_id) <= MAX_SESSION_ID_CHARS or not session_id.isprintable():
        rule = f"must have from 1 to {MAX_SESSION_ID_CHARS} printable characters"
        raise InvalidRequest(field, session_id, rule)
    return f"{tenant}:{session_id}"


def named_session_key(tenant: str, session_id: str, field: str = "session_id") -> str:
    """`session_key` of a session that a client names itself: a response's session changes by /v1/responses alone."""
    if session_id.startswith(RESPONSE_PREFIX):
        rule = f"must not begin with {RESPONSE_PREFIX!r}, as ids of responses do: /v1/responses goes on from these"
        raise InvalidRequest(field, session_id, rule)
    return session_key(tenant, session_id, field)


def affinity_key(tenant: str, hint: str) -> str:
    """Name what a caller's requests have in common: a hint where they should run, never a session."""
    return _digest("affinity", tenant, hint)


def _digest(*parts: str) -> str:
    """128 bits over length-prefixed parts, so that no two lists of parts hash alike."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode()
        hasher.update(len(encoded).to_bytes(8, "big") + encoded)
    return hasher.hexdigest()
