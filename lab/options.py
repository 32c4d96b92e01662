"""The options of the laboratory's commands, as tables: what each is called, says, and may be."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mneme.errors import ConfigError, shown


class Option(NamedTuple):
    """An option with one value; `bounds` are those of a number, if it is given."""

    name: str
    metavar: str | None
    help: str | None
    kind: Callable[[str], Any] = str
    default: Any = None
    bounds: tuple[float, float] | None = None
    choices: Sequence[str] | None = None

    @property
    def attribute(self) -> str:
        return self.name.lstrip("-").replace("-", "_")


def add_options(parser: argparse._ActionsContainer, options: Iterable[Option]) -> None:
    """Add these to a parser, or to a group of it."""
    for name, metavar, text, kind, default, _, choices in options:
        parser.add_argument(name, type=kind, default=default, metavar=metavar, choices=choices, help=text)


def check_options(args: argparse.Namespace, options: Iterable[Option]) -> None:
    """Raise `ConfigError` for a number out of its bounds."""
    for each in options:
        value = getattr(args, each.attribute, None)
        if each.bounds is not None and value is not None and not each.bounds[0] <= value <= each.bounds[1]:
            least, most = (str(bound) if isinstance(bound, int) else f"{bound:g}" for bound in each.bounds)
            raise ConfigError(f"{each.name.lstrip('-')}: must be from {least} to {most} (got {shown(value)})")
