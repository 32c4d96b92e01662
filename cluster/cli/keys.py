"""`mneme keys add|list|revoke`: edits the file of keys that `http.keys_file` names; a running server reads it again.

A secret is drawn here and shown once; the file has its SHA-256.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from mneme.cluster.api_keys import ApiKey, KeyList, Role, read_key_file, sha256_of
from mneme.errors import ConfigError

_LIMITS = ("requests_per_min", "tokens_per_min", "concurrency")


def add_keys_arguments(parser: argparse.ArgumentParser) -> None:
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    add = _command(whats, "add", "make a key; its secret is printed, once")
    add.add_argument("name", help="what the key is called in the file")
    add.add_argument("--role", choices=get_args(Role), default="user", help="admins may warm prompts for all tenants")
    add.add_argument("--requests-per-min", type=int, metavar="N")
    add.add_argument("--tokens-per-min", type=int, metavar="N", help="of prompts and answers")
    add.add_argument("--concurrency", type=int, metavar="N", help="requests at once")
    _command(whats, "list", "names, roles and limits")
    _command(whats, "revoke", "remove a key").add_argument("name")


def _command(
    whats: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    parser = whats.add_parser(name, help=text, description=text)
    parser.add_argument("--file", type=Path, default=Path("keys.yaml"), help="http.keys_file (default keys.yaml)")
    return parser


def keys(args: argparse.Namespace) -> int:
    """Run one of the commands. Raises `ConfigError`."""
    if args.what == "list":
        for key in read_key_file(args.file):
            shown = [f"{name}={value}" for name in _LIMITS if (value := getattr(key, name)) is not None]
            print(key.name, key.role, f"sha256={key.sha256[:12]}", *shown)
        return 0
    with _edited(args.file):
        known = read_key_file(args.file) if args.file.exists() else ()
        if args.what == "revoke":
            left = [key for key in known if key.name != args.name]
            if len(left) == len(known):
                raise ConfigError(f"{args.file}: has no key called {args.name}")
            _write(args.file, left)
            return 0
        secret = f"mneme-{secrets.token_urlsafe(32)}"
        limits = {name: getattr(args, name) for name in _LIMITS}
        _write(args.file, [*known, ApiKey(name=args.name, sha256=sha256_of(secret), role=args.role, **limits)])
    print(secret)
    return 0


@contextlib.contextmanager
def _edited(path: Path) -> Iterator[None]:
    """Let nobody else edit the file meanwhile; the folder is locked, as the file itself is replaced."""
    try:
        folder = os.open(path.absolute().parent, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{path}: its folder cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(path: Path, keys: Sequence[ApiKey]) -> None:
    """Replace the file at once, readable for its owner alone, so that a server reads the old one or the new one."""
    import yaml

    KeyList(keys=tuple(keys))  # raises `ConfigError` where two are alike
    entries = [{name: value for name, value in asdict(key).items() if value is not None} for key in keys]
    try:
        fd, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                yaml.safe_dump({"keys": entries}, file, sort_keys=False)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
