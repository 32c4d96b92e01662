"""API keys: whom a secret belongs to, what that caller may do, and how much of it in a minute.

Keys come from the configuration, which has secrets of admins, or from a file of tenants that `mneme keys` edits and
that a running ingress reads again when it changes. Of a secret only its SHA-256 is kept: secrets are drawn from 256
bits, so a slow hash would protect nothing more. Limits hold in each ingress process.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from mneme.cluster.tenancy import PUBLIC, tenant_of_secret
from mneme.config import check_range, parse, yaml_problem
from mneme.errors import ConfigError, RateLimited, Unauthorized, shown

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
Role = Literal["user", "admin"]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_FILE_BYTES = 2**22
_RELOAD_S = 1.0  # how long a change of the file may go unseen
_BUSY_S = 1.0  # when to come back where others of the same key must end first


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One caller; a limit that is None is none."""

    name: str  # of the tenant, as logs and metrics have it
    sha256: str  # of the secret, in hexadecimal digits
    role: Role = "user"  # an admin sees all tenants, and may warm, drop and explain for them
    requests_per_min: int | None = None  # None: no limit, here and below
    tokens_per_min: int | None = None  # of prompts and answers
    concurrency: int | None = None  # requests at once

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"name: must have 1 to 64 letters, digits or any of . _ - (got {shown(self.name)})")
        if not _SHA256.fullmatch(self.sha256):
            raise ConfigError(f"sha256: must have 64 hexadecimal digits in lower case, for the key {self.name}")
        for limit in ("requests_per_min", "tokens_per_min", "concurrency"):
            value = getattr(self, limit)
            if value is not None:
                check_range(f"{limit} of the key {self.name}", value, 1, 10**12)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyList:
    """What a file of keys holds, as YAML or JSON."""

    keys: tuple[ApiKey, ...] = ()

    def __post_init__(self) -> None:
        for what in ("name", "sha256"):
            given = [getattr(key, what) for key in self.keys]
            if twice := next((each for i, each in enumerate(given) if each in given[:i]), None):
                raise ConfigError(f"keys: two have the {what} {twice}")


def read_keys(text: str, source: str) -> tuple[ApiKey, ...]:
    """Parse a list of keys; raises `ConfigError` that names the `source`."""
    import yaml

    try:
        loaded = yaml.safe_load(text)
        return parse(KeyList, {} if loaded is None else loaded).keys
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: is not valid YAML: {yaml_problem(error)}") from None


def read_key_file(path: Path) -> tuple[ApiKey, ...]:
    """Read a file of keys; raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigError(f"{path}: is larger than {_MAX_FILE_BYTES} bytes")
        return read_keys(content.decode(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text in UTF-8") from None


def sha256_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class Bucket:
    """Fills evenly up to what a minute allows; more can be taken than is there, and is then waited for."""

    def __init__(self, per_min: int, clock: Clock) -> None:
        self.per_min = per_min
        self._clock = clock
        self._level = float(per_min)
        self._updated_s = clock()

    def level(self) -> float:
        now = self._clock()
        self._level = min(self.per_min, self._level + (now - self._updated_s) * self.per_min / 60)
        self._updated_s = now
        return self._level

    def spend(self, amount: float) -> None:
        self._level = self.level() - amount

    def wait_s(self, level: float) -> float:
        """Seconds until it holds so much."""
        return max(0.0, (level - self.level()) * 60 / self.per_min)


class Meter:
    """Counts what one key uses, against its limits."""

    def __init__(self, key: ApiKey, clock: Clock) -> None:
        self._key = key
        self._requests = None if key.requests_per_min is None else Bucket(key.requests_per_min, clock)
        self._tokens = None if key.tokens_per_min is None else Bucket(key.tokens_per_min, clock)
        self._num_running = 0

    def begin(self) -> None:
        """Take a request in, until `end`; raises `RateLimited`."""
        limit, requests, tokens = self._key.concurrency, self._requests, self._tokens
        if limit is not None and self._num_running >= limit:
            raise RateLimited(f"this key may have {limit} requests at once", retry_after_s=_BUSY_S)
        if requests is not None and requests.level() < 1:
            raise RateLimited(
                f"this key may send {requests.per_min} requests a minute", retry_after_s=requests.wait_s(1)
            )
        if tokens is not None and tokens.level() < 1:
            what = f"this key may use {tokens.per_min} tokens a minute"
            raise RateLimited(what, retry_after_s=tokens.wait_s(1))
        if requests is not None:
            requests.spend(1)
        self._num_running += 1

    def end(self) -> None:
        self._num_running -= 1

    def use(self, num_tokens: int) -> None:
        """Count tokens of a request that was taken in."""
        if self._tokens is not None:
            self._tokens.spend(num_tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What OpenAI's API says of limits."""
        found: list[tuple[str, str]] = []
        for what, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                found += [
                    (f"x-ratelimit-limit-{what}", str(bucket.per_min)),
                    (f"x-ratelimit-remaining-{what}", str(max(0, math.floor(bucket.level())))),
                    (f"x-ratelimit-reset-{what}", f"{bucket.wait_s(bucket.per_min):.3f}s"),
                ]
        return [(name.encode(), value.encode()) for name, value in found]


class Caller(NamedTuple):
    tenant: str
    name: str  # of the key
    is_admin: bool
    meter: Meter | None = None  # None: without limits


class Keyring:
    """Knows who may call: everyone where no keys are configured, and a file without keys lets nobody in."""

    def __init__(
        self,
        secrets: Sequence[str] = (),
        file: Path | None = None,
        *,
        clock: Clock,
    ) -> None:
        """`secrets` are plain ones of admins without limits. Raises `ConfigError` if the file is bad."""
        self._clock = clock
        self._given = [ApiKey(name=f"key-{i}", sha256=sha256_of(s), role="admin") for i, s in enumerate(secrets)]
        self._file = file
        self._meters: dict[ApiKey, Meter] = {}
        self._keys: list[ApiKey] = []
        self._stamp: tuple[int, ...] | None = None
        self._looked_s = clock()
        if file is not None:
            self._stamp = _stamp(file)
        self._replace_keys(() if file is None else read_key_file(file))

    @property
    def is_open(self) -> bool:
        """Everyone may call, and all are one tenant."""
        return not self._given and self._file is None

    @property
    def tenants(self) -> list[str]:
        """Everyone who can be authenticated now."""
        return [PUBLIC] if self.is_open else [tenant_of_secret(key.sha256) for key in self._keys]

    def authenticate(self, authorization: str | None) -> Caller:
        """Find who sends this Authorization header, in the same time for every key; raises `Unauthorized`."""
        if self.is_open:
            return Caller(PUBLIC, PUBLIC, is_admin=True)
        self._look_again()
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise Unauthorized("an API key is needed: Authorization: Bearer <key>")
        digest = sha256_of(given.strip())
        found = [key for key in self._keys if hmac.compare_digest(digest, key.sha256)]
        if not found:
            raise Unauthorized("the API key is not known")
        key = found[0]
        return Caller(tenant_of_secret(key.sha256), key.name, key.role == "admin", self._meters.get(key))

    def _look_again(self) -> None:
        now = self._clock()
        if self._file is None or now - self._looked_s < _RELOAD_S:
            return
        self._looked_s, stamp = now, _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._replace_keys(read_key_file(self._file))
            logger.info("keys=%d read again from %s", len(self._keys), self._file)
        except ConfigError as error:
            logger.error("the keys that were read before stay: %s", error)

    def _replace_keys(self, of_file: Sequence[ApiKey]) -> None:
        keys = [*self._given, *of_file]
        KeyList(keys=tuple(keys))  # a tenant of an admin's name would have its figures
        limited = [key for key in keys if key.requests_per_min or key.tokens_per_min or key.concurrency]
        self._meters = {key: self._meters.get(key) or Meter(key, self._clock) for key in limited}
        self._keys = keys


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Say which version of a file this is."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
