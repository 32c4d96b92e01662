"""The version of this package, where every module can import it without the package's API."""

import functools
import json
import os
from importlib import metadata

__version__ = "0.1.0"


@functools.cache
def revision() -> str:
    """Return the commit that this was built from: what `MNEME_REVISION` or pip says; empty: not known."""
    try:
        installed = json.loads(metadata.distribution("mneme").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        installed = {}
    return os.environ.get("MNEME_REVISION") or str(installed.get("vcs_info", {}).get("commit_id", ""))
