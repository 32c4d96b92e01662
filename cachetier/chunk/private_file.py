"""Small files in which a process remembers what it measured: believed only if nobody else may have written them."""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

_MAX_BYTES = 1 << 20


class NotPrivate(ValueError):
    """The file is a link or another user's, or others may write to it."""


def read_private(path: Path) -> Any:
    """The JSON in a file; None if there is no such file. Raises OSError, or ValueError (`NotPrivate`)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022 or not stat.S_ISREG(status.st_mode):
            raise NotPrivate(f"{path}: another user's, or others may write to it")
        try:
            return json.loads(file.read(_MAX_BYTES))
        except RecursionError as error:
            raise ValueError(f"{path}: nested too deeply") from error


def write_private(path: Path, content: Any) -> None:
    """Put JSON in the place of the file, whole or not at all. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            json.dump(content, file)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
