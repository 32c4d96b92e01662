"""Configuration from mappings: frozen dataclasses, unknown keys refused, one YAML and the same keys everywhere.

Each dataclass stands next to its owner and checks its own ranges in `__post_init__`; here is only the way in.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mneme.errors import ConfigError, InvalidRequest, shown

T = TypeVar("T")

_MAX_LISTED = 8  # keys that a message names: all there are, or those most like the unknown one


def parse(cls: type[T], mapping: Mapping[str, Any], path: str = "") -> T:
    """Build `cls` (a dataclass) from a mapping; raises `ConfigError` that names the key, the value and the rule."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{path or 'configuration'}: must be a mapping (got {shown(mapping)})")
    hints = get_type_hints(cls)
    for key in mapping:
        if key not in hints:
            raise ConfigError(f"{_join(path, key)}: unknown key; {_meant(str(key), hints)}")
    for field in fields(cls):  # type: ignore[arg-type]  # a dataclass
        if field.name not in mapping and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{_join(path, field.name)}: must be given")
    values = {key: _convert(hints[key], value, _join(path, key)) for key, value in mapping.items()}
    try:
        return cls(**values)
    except InvalidRequest as error:  # a type that requests use too, and that knows nothing of paths
        raise ConfigError(f"{_join(path, error.field)}: {error.rule} (got {shown(error.value)})") from None


def with_assignments(
    mapping: Mapping[str, Any], assignments: list[str], values: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A copy of `mapping` with `a.b=value` assignments (from `--set`, YAML scalars), then `values` by dotted key."""
    result: dict[str, Any] = dict(mapping.items())
    for assignment in assignments:
        dotted, equals, text = assignment.partition("=")
        if not equals or not dotted:
            raise ConfigError(f"--set {assignment}: must read key=value")
        _assign(result, dotted, _yaml_value(assignment, text))
    for dotted, value in (values or {}).items():
        _assign(result, dotted, value)
    return result


def _assign(node: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for key in parents:
        child = node.get(key)
        node[key] = dict(child) if isinstance(child, Mapping) else {}
        node = node[key]
    node[leaf] = value


def _yaml_value(assignment: str, text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no such date, too many digits
        raise ConfigError(f"--set {shown(assignment)}: the value is not valid YAML ({yaml_problem(error)})") from error


def yaml_problem(error: Exception) -> str:
    """What is wrong, in one short line."""
    problem = getattr(error, "problem", None) or str(error)
    return shown(problem.splitlines()[0] if problem else type(error).__name__)


def check_range(path: str, value: float, low: float, high: float) -> None:
    """Raise `ConfigError` unless `low <= value <= high`."""
    if not low <= value <= high:
        raise ConfigError(f"{path}: must be from {low:g} to {high:g} (got {shown(value)})")


def _meant(key: str, hints: Mapping[str, Any]) -> str:
    """The known keys, or those most like an unknown one: beside it, or one level below."""
    known = list(hints)
    if below := [f"{name}.{key}" for name, hint in hints.items() if is_dataclass(hint) and key in get_type_hints(hint)]:
        return f"did you mean {' or '.join(below)}?"
    if close := get_close_matches(key, known, n=1):
        return f"did you mean {close[0]}?"
    if len(known) <= _MAX_LISTED:
        return f"known are {', '.join(known)}"
    return f"known are, among others, {', '.join(get_close_matches(key, known, n=_MAX_LISTED, cutoff=0.2))}"


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(get_args(hint), value, path)
    if origin is Literal:
        if value is False and "off" in get_args(hint):  # YAML's own reading of an `off` without quotes
            return "off"
        if value not in get_args(hint):
            raise ConfigError(f"{path}: must be one of {', '.join(map(str, get_args(hint)))} (got {shown(value)})")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path}: must be a list (got {shown(value)})")
        return tuple(_convert(get_args(hint)[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if is_dataclass(hint):
        return parse(hint, value, path)  # type: ignore[arg-type]
    return _convert_scalar(hint, value, path)


def _convert_union(options: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in options:
        return None
    kinds = [option for option in options if option is not type(None)]
    is_list = isinstance(value, list | tuple)
    return _convert(next((kind for kind in kinds if (get_origin(kind) is tuple) == is_list), kinds[0]), value, path)


def _convert_scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{path}: is too large (got {shown(value)})") from None
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{path}: must be of type {hint.__name__} (got {shown(value)})")
