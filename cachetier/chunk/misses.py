"""Why a chunk cannot be had. Every fault of a tier is one of these: a miss and a recompute, never an error."""

from __future__ import annotations

from enum import Enum


class Miss(Enum):
    """The values are the names of counters."""

    ABSENT = "absent"  # never there, evicted, or deleted by someone else
    BUSY = "busy"  # this time: too many open files, no memory; the file may be sound
    IO_ERROR = "io_error"
    NOT_OURS = "not_ours"  # a link, not a plain file, or another user's
    SHORT = "short"  # the file ends before what it says it holds, or ended while it was read
    NO_HEADER = "no_header"
    OTHER_VERSION = "other_version"
    BAD_HEADER = "bad_header"  # the header's checksum is wrong, or what it says is absurd
    OTHER_KEY = "other_key"
    OTHER_MODEL = "other_model"
    OTHER_TOKENS = "other_tokens"
    BAD_CHECKSUM = "bad_checksum"  # of a layer
