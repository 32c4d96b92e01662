"""Configuration of a cluster: one mapping for the command line, a YAML file, and a RayService's `args`."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.cluster.api_keys import Keyring
from mneme.config import check_range, parse, with_assignments, yaml_problem
from mneme.errors import ConfigError, shown
from mneme.machine import available_bytes
from mneme.replicas.config import EMBEDDED_MODEL, EngineConfig
from mneme.replicas.text.calls.dialects import with_plugin
from mneme.router.autoscaler import AutoscaleConfig
from mneme.router.score import RouterConfig

MIB = 2**20
# A tier has a tenth of the memory then, as that of one process. What is not used is not taken: pages come as they are
# written to.
_STORE_SHARE, _SHM_SHARE = 0.25, 0.8
_LEAST_STORE, _MOST_STORE = 192 * MIB, 64 << 30
FLUSH_S = 2.0  # when the server stops: for what is being saved to reach the cache tier


_ADDRESS = re.compile(r"auto|\S+:[0-9]{1,5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Says who may call, how much a client may make this process hold, and how answers are read."""

    api_keys: tuple[str, ...] = ()  # secrets of admins; without keys of any kind everyone may call, as one tenant
    keys_file: str | None = None  # tenants, with their limits; `mneme keys` edits it, and a change is read at once
    tool_call_parser: str = "auto"  # how the model writes tool calls: docs/tools.md; auto: found by its chat template
    reasoning_parser: str = "auto"  # how it writes reasoning; auto: likewise
    tool_parser_plugin: str | None = None  # a Python file with formats of one's own for both
    otlp_endpoint: str | None = None  # where spans of requests are sent: OTLP over HTTP, with `mneme[otel]`
    shutdown_grace_s: float = 0.5  # how long answers go on when the server stops; then they end with an error
    max_connections_per_address: int = 2048  # of the proxy's 4,096; in IPv6 of a /64

    def __post_init__(self) -> None:
        check_range("http.max_connections_per_address", self.max_connections_per_address, 1, 2**20)
        check_range("http.shutdown_grace_s", self.shutdown_grace_s, 0, 86_400)
        if not all(key.strip() == key and key.isascii() and key for key in self.api_keys):
            raise ConfigError("http.api_keys: each key is ASCII text without spaces around it")
        with_plugin(self.tool_parser_plugin).check(self.tool_call_parser, self.reasoning_parser)
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError("http.otlp_endpoint: must begin with http:// or https://")

    def keyring(self, clock: Callable[[], float] = time.monotonic) -> Keyring:
        """Read the keys; raises `ConfigError` if their file is bad."""
        file = None if self.keys_file is None else Path(self.keys_file).expanduser()
        return Keyring(self.api_keys, file, clock=clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressConfig:
    """The HTTP front: authenticates, renders, routes, streams."""

    replicas: int = 1  # more share the load, and each has a router and an index of its own
    cpus: float = 0.0  # what Ray reserves for each; 0 fits everywhere
    drain_s: float = 3600.0  # one that is replaced: how long answers go on there; nobody can take them over

    def __post_init__(self) -> None:
        check_range("ingress.replicas", self.replicas, 1, 64)
        check_range("ingress.cpus", self.cpus, 0, 1024)
        check_range("ingress.drain_s", self.drain_s, 0, 86_400)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """The Ray instance that `mneme serve` starts for itself, or joins; a RayService brings its own and ignores this."""

    address: str | None = None  # of a running cluster, or auto: the one that this machine is part of
    # Of shared memory; two fifths of it are the cache tier's unless that says. None: a quarter of the memory that is
    # available, as far as /dev/shm has room for it, at least 192 MiB and at most 64 GiB.
    object_store_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.object_store_bytes is not None:
            check_range("ray.object_store_bytes", self.object_store_bytes, 80 * MIB, 2**44)
        if self.address is not None and not _ADDRESS.fullmatch(self.address):
            raise ConfigError(f"ray.address: must be auto or HOST:PORT (got {shown(self.address)})")

    def store_bytes(self) -> int:
        """Return the size of the object store on this machine."""
        if self.object_store_bytes is not None:
            return self.object_store_bytes
        try:
            room = _SHM_SHARE * shutil.disk_usage("/dev/shm").free
        except OSError:
            room = 0.0
        return int(max(_LEAST_STORE, min(_STORE_SHARE * available_bytes(), room, _MOST_STORE)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherModel:
    """Another model beside the first, on replicas of its own; the fields are those of `ClusterConfig`.

    What it leaves out has that field's default, not what the first model has.
    """

    model: str
    served_name: str | tuple[str, ...] | None = None
    replicas: int | None = None
    autoscale: AutoscaleConfig | None = None
    cpus_per_replica: float = 0.0
    gpus_per_replica: float | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Everything `mneme serve` needs to know."""

    model: str = EMBEDDED_MODEL  # the embedded model's name, or a local Hugging Face directory
    # What clients call it, by one name or several, of which answers and metrics have the first; None: the directory's.
    served_name: str | tuple[str, ...] | None = None
    models: tuple[FurtherModel, ...] = ()  # others, with replicas of their own: model, served_name, replicas, ...
    replicas: int | None = None  # None: one for each GPU, or two on the CPU
    autoscale: AutoscaleConfig | None = None  # instead of a fixed number
    host: str = "127.0.0.1"  # where it listens; 0.0.0.0: on all addresses, which wants keys
    port: int = 8000  # of HTTP
    cpus_per_replica: float = 0.0  # what Ray reserves; 0 fits everywhere, more keeps replicas off a full node
    gpus_per_replica: float | None = None  # None: 1 where there are GPUs; a fraction: engines share one, and its memory
    log_format: Literal["text", "json"] = "text"  # of lines in logs; json: an object each
    start_timeout_s: float = 600.0  # until all replicas are ready; a start that takes longer has failed
    drain_grace_s: float = 10.0  # a replica that stops: how long answers go on there before others take them over
    engine: EngineConfig = field(default_factory=EngineConfig)  # of each replica
    cache: CacheConfig = field(default_factory=CacheConfig)  # of each node
    router: RouterConfig = field(default_factory=RouterConfig)  # of each ingress, as are the next
    http: HttpConfig = field(default_factory=HttpConfig)
    ingress: IngressConfig = field(default_factory=IngressConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model: must name a model or a directory")
        if self.served_name is not None and not (self.served_name and all(self.model_names)):
            raise ConfigError("served_name: must not be empty")
        if not self.model_name:
            raise ConfigError(f"model: {shown(self.model)} has no name of its own; set served_name")
        if self.replicas is not None:
            check_range("replicas", self.replicas, 1, 1024)
            if self.autoscale is not None:
                raise ConfigError("replicas: must not be given beside autoscale, which has a min and a max")
        check_range("port", self.port, 1, 65535)
        check_range("cpus_per_replica", self.cpus_per_replica, 0, 1024)
        if self.gpus_per_replica is not None:
            check_range("gpus_per_replica", self.gpus_per_replica, 0, 1)  # an engine uses one device
        check_range("start_timeout_s", self.start_timeout_s, 1, 86_400)
        check_range("drain_grace_s", self.drain_grace_s, 0, 86_400)
        self._check_models()

    @property
    def is_private(self) -> bool:
        """Say whether it listens to this machine alone."""
        return self.host.startswith("127.") or self.host in ("localhost", "::1")

    def _check_models(self) -> None:
        names = [*self.model_names]
        for i, model in enumerate(self.models):
            path = f"models[{i}]"
            try:
                own = self._with(model).model_names
            except ConfigError as error:
                raise ConfigError(f"{path}.{error}") from None
            if taken := [name for name in own if name in names]:
                raise ConfigError(f"{path}.served_name: two models are called {shown(taken[0])}")
            if model.engine.session_ttl_s != self.engine.session_ttl_s:
                raise ConfigError(f"{path}.engine.session_ttl_s: must be the first model's: they share session logs")
            names += own

    def each_model(self) -> tuple[ClusterConfig, ...]:
        """Return the configuration of a cluster for each model alone, the first one's first."""
        return replace(self, models=()), *map(self._with, self.models)

    def _with(self, model: FurtherModel) -> ClusterConfig:
        return replace(self, models=(), **{each.name: getattr(model, each.name) for each in fields(model)})

    @property
    def model_name(self) -> str:
        """The model's name in the API: the first, if it has several."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        given = self.served_name or os.path.basename(os.path.abspath(Path(self.model).expanduser()))
        return (given,) if isinstance(given, str) else tuple(dict.fromkeys(given))

    def as_mapping(self) -> dict[str, Any]:
        """Plain values that `parse` turns back into an equal configuration."""
        return asdict(self)


def load_config(
    path: Path | None = None,
    assignments: list[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    own_disk: Callable[[], DiskTierConfig | None] = lambda: None,
) -> ClusterConfig:
    """The YAML file, then `key=value` assignments, then `overrides` by dotted key; raises `ConfigError`.

    own_disk  gives the disk of a server on this machine alone of which none of these names `cache.disk`, not even null
    """
    mapping = with_assignments(_read_yaml(path) if path else {}, assignments or [], overrides or {})
    config = from_mapping(mapping)
    if "disk" in mapping.get("cache", {}) or not config.cache.enabled or config.ray.address is not None:
        return config
    return replace(config, cache=replace(config.cache, disk=own_disk()))


def from_mapping(mapping: Mapping[str, Any]) -> ClusterConfig:
    """Parse a configuration, and read its file of keys; raises `ConfigError`."""
    config = parse(ClusterConfig, mapping)
    config.http.keyring()
    return config


def _read_yaml(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text in UTF-8") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no such date, too many digits
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
        raise ConfigError(f"{path}{place}: is not valid YAML: {yaml_problem(error)}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{path}: must be a mapping (got {shown(loaded)})")
    return loaded
