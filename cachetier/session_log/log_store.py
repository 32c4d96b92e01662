"""Where session logs are kept, as an engine sees it."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple, Protocol

from mneme.cachetier.names import Appended, tenant_id
from mneme.cachetier.session_log.rows import LogRows

_NAME_BYTES = 16


class LogKey(NamedTuple):
    """Says which session's log; says neither whose nor which to whoever does not know the tenant's salt."""

    name: bytes  # 16
    tenant: bytes  # its id, 8 bytes, as `names.tenant_id` says it


class SessionLogStore(Protocol):
    """Calls end in bounded time; several threads make them, never one that runs an engine's steps."""

    def append(self, key: LogKey, rows: LogRows) -> Appended:
        """Write a session's row and turns behind those that are there, or all there are; all or nothing."""

    def read(self, key: LogKey, newer_than: int = 0) -> LogRows | None:
        """All rows of a log, also of a session that was deleted; None: it is no newer than that version.

        Raises OSError (TimeoutError too) if that cannot be known now.
        """

    def delete(self, key: LogKey, at_least: int = 0) -> bool:
        """Delete a log, and what is older than version `at_least`; whether there was a session.

        Raises OSError if that is not sure.
        """

    def delete_tenant(self, tenant: bytes) -> int:
        """Delete all logs of a tenant; how many there were, copies too. Raises OSError if that is not sure."""

    def close(self) -> None: ...


def log_key(model: bytes, salt: str, session_id: str) -> LogKey:
    """`model` says whose token ids they are: another model must not take them for its own."""
    secret = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32, person=b"mneme logs").digest()
    hasher = blake2b(digest_size=_NAME_BYTES, key=secret, person=b"mneme session")
    for part in (model, session_id.encode("utf-8", "surrogatepass")):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return LogKey(hasher.digest(), tenant_id(salt))
