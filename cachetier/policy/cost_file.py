"""Where a cost model is kept from one start to the next: a small file for each model on each machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mneme.cachetier.chunk.private_file import read_private, write_private
from mneme.cachetier.policy.cost_model import CostModel
from mneme.errors import ConfigError

log = logging.getLogger(__name__)

_VERSION = 1  # raised when the numbers of older files mean something else
_FORMAT = "mneme cost model"


class CostFile:
    """`machine`: all that costs depend on beside the model, such as processors, devices and threads."""

    def __init__(self, folder: Path, fingerprint: bytes, machine: str) -> None:
        self._whose = {"format": _FORMAT, "version": _VERSION, "model": fingerprint.hex(), "machine": machine}
        named = blake2b(fingerprint + machine.encode(), digest_size=12, person=b"mneme costs").hexdigest()
        self.path = folder / f"costs-{named}.json"

    def read(self, clock: Callable[[], float] = time.monotonic) -> CostModel | None:
        """What was learned before; None, with a warning if there is a file, for one that is broken or foreign."""
        try:
            found = read_private(self.path)
            if found is None:
                return None
            if not isinstance(found, dict) or any(found.get(key) != value for key, value in self._whose.items()):
                raise ValueError("it is of another model, machine or version")
            return CostModel.from_mapping(found.get("costs"), clock)
        except (OSError, ValueError, ConfigError) as error:
            log.warning("costs are measured anew, %s cannot be used: %s", self.path, error)
            return None

    def write(self, costs: CostModel) -> None:
        """As good as it can: what is not kept is measured again."""
        try:
            write_private(self.path, {**self._whose, "costs": costs.as_mapping()})
        except OSError as error:
            log.warning("costs are not kept, %s cannot be written: %s", self.path, error)


def costs_in(content: Any, clock: Callable[[], float] = time.monotonic) -> CostModel | None:
    """The cost model in a file's JSON, of whatever model and machine; None if it is something else.

    Raises `ConfigError` for one of another version, or broken.
    """
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        return None
    if content.get("version") != _VERSION:
        raise ConfigError(f"cost model: version {content.get('version')!r}; this is version {_VERSION}")
    return CostModel.from_mapping(content.get("costs"), clock)
