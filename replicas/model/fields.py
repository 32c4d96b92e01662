"""Typed reads from a model's `config.json`, each with an error that names the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mneme.errors import CheckpointError, shown

_MAX_DIMENSION = 2**24


class Fields:
    """Reads the fields of one JSON object; a null is a field that is not there.

    where  begins each error message
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def with_defaults(self, **values: Any) -> Fields:
        """Return the same fields, and these where one is not there; one that is null stays so."""
        return Fields({**values, **self.raw}, self.where)

    def with_values(self, **values: Any) -> Fields:
        """Return the same fields but for these."""
        return Fields({**self.raw, **values}, self.where)

    def error(self, name: str, rule: str) -> CheckpointError:
        """Return the error for a field that breaks a rule."""
        return CheckpointError(f"{self.where}: {name}: {rule} (got {shown(self.raw.get(name))})")

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Read an integer from `least` on; without a default the field must be there."""
        value = self.raw.get(name)
        if value is None and default is not None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MAX_DIMENSION:
            raise self.error(name, f"must be an integer from {least} to {_MAX_DIMENSION}")
        return value

    def number(self, name: str, default: float) -> float:
        """Read a number between 0 and 1."""
        value = self.positive(name, default)
        if value >= 1:
            raise self.error(name, "must be a number between 0 and 1")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """Read a positive number; without a default the field must be there."""
        value = self.raw.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise self.error(name, "must be a positive number")
        return float(value)

    def optional(self, name: str, default: float | None = None) -> float | None:
        """Read a positive number, or None where the field is null; `default` where it is not there."""
        return default if name not in self.raw else None if self.raw[name] is None else self.positive(name)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        if value is None:
            value = default
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def one_of(self, name: str, choices: tuple[str, ...], default: str | None = None, *, hint: str = "") -> str:
        """Read one of some words; `hint` says more of them in the error."""
        value = self.raw.get(name)
        if value is None:
            value = default
        if value not in choices:
            raise self.error(name, f"must be one of {', '.join(choices)}{hint}")
        return str(value)

    def inner(self, name: str) -> Fields:
        """Read an object, whose fields are named behind its own name; an absent one has none."""
        value = self.raw.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.error(name, "must be an object")
        return Fields(value, f"{self.where}: {name}")

    def refuse(self, name: str, why: str) -> None:
        """Raise for a field that is set."""
        if self.raw.get(name):
            raise self.error(name, why)
