"""Who is calling, and which KV and which sessions that caller may reach.

A tenant is an API key; without configured keys there is one, "public". The salt that separates tenants' KV is
derived here from the key: a client's `cache_salt` can only narrow what it shares, never reach another tenant.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from mneme.cachetier.chunk.keys import tenant_id
from mneme.errors import InvalidRequest, Unauthorized

PUBLIC = "public"  # the only tenant where there are no API keys
MAX_SESSION_ID_CHARS = 256


def authenticate(authorization: str | None, api_keys: Sequence[str]) -> str:
    """The tenant of an Authorization header, in the same time for every wrong key; raises `Unauthorized`."""
    if not api_keys:
        return PUBLIC
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        raise Unauthorized("an API key is needed: Authorization: Bearer <key>")
    given = given.strip()
    is_known = [hmac.compare_digest(given.encode("utf-8", "replace"), key.encode()) for key in api_keys]
    if not any(is_known):
        raise Unauthorized("the API key is not known")
    return _digest("tenant", given)


def tenants(api_keys: Sequence[str]) -> list[str]:
    """Everyone who can be authenticated."""
    return list(dict.fromkeys(_digest("tenant", key) for key in api_keys)) or [PUBLIC]


def kv_salt(tenant: str, cache_salt: str | None) -> str:
    """The root of the prefix forest that a request may share with; `keys.tenant_of` it is the tenant's own salt."""
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
