"""Configuration of a cluster: one mapping for the command line, a YAML file, and a RayService's `args`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mneme.cachetier.cache_config import CacheConfig
from mneme.cluster.http_config import HttpConfig
from mneme.config import check_range, parse, with_assignments, yaml_problem
from mneme.errors import ConfigError, shown
from mneme.replicas.config import EngineConfig
from mneme.replicas.model_directory import EMBEDDED_MODEL
from mneme.router.score import RouterConfig

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressConfig:
    """The HTTP front: authenticates, renders, routes, streams."""

    replicas: int = 1
    cpus: float = 0.0  # what Ray reserves for each

    def __post_init__(self) -> None:
        check_range("ingress.replicas", self.replicas, 1, 64)
        check_range("ingress.cpus", self.cpus, 0, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """The Ray instance that `mneme serve` starts for itself; a RayService brings its own and ignores this."""

    object_store_bytes: int = 192 * MIB
    temp_dir: str | None = None  # None: a fresh directory under the system's; removed at the end

    def __post_init__(self) -> None:
        check_range("ray.object_store_bytes", self.object_store_bytes, 80 * MIB, 2**44)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Everything `mneme serve` needs to know."""

    model: str = EMBEDDED_MODEL  # the embedded model's name, or a local Hugging Face directory
    served_name: str | None = None  # what clients call it; None: the model's or the directory's name
    replicas: int | None = None  # None: one for each GPU, or two on the CPU (gpus.py)
    host: str = "127.0.0.1"
    port: int = 8000
    cpus_per_replica: float = 0.0  # what Ray reserves; 0 fits everywhere, more keeps replicas off a full node
    gpus_per_replica: float | None = None  # None: 1 where there are GPUs; a fraction: engines share one, and its memory
    start_timeout_s: float = 600.0
    engine: EngineConfig = field(default_factory=EngineConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    ingress: IngressConfig = field(default_factory=IngressConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model: must name a model or a directory")
        if self.served_name == "":
            raise ConfigError("served_name: must not be empty")
        if not self.model_name:
            raise ConfigError(f"model: {shown(self.model)} has no name of its own; set served_name")
        if self.replicas is not None:
            check_range("replicas", self.replicas, 1, 1024)
        check_range("port", self.port, 1, 65535)
        check_range("cpus_per_replica", self.cpus_per_replica, 0, 1024)
        if self.gpus_per_replica is not None:
            check_range("gpus_per_replica", self.gpus_per_replica, 0, 1)  # an engine uses one device
        check_range("start_timeout_s", self.start_timeout_s, 1, 86_400)

    @property
    def model_name(self) -> str:
        """The name in the API."""
        return self.served_name or os.path.basename(os.path.abspath(Path(self.model).expanduser()))

    def as_mapping(self) -> dict[str, Any]:
        """Plain values that `parse` turns back into an equal configuration."""
        return asdict(self)


def load_config(
    path: Path | None = None, assignments: list[str] | None = None, overrides: Mapping[str, Any] | None = None
) -> ClusterConfig:
    """The YAML file, then `key=value` assignments, then `overrides` by dotted key; raises `ConfigError`."""
    return parse(ClusterConfig, with_assignments(_read_yaml(path) if path else {}, assignments or [], overrides or {}))


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
