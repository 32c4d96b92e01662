"""What every benchmark of the cache tier is told on its command line."""

from __future__ import annotations

import argparse
from pathlib import Path


def cache_arguments(description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """`description`: the script's docstring; `quick` says what `--quick` leaves out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default: the temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for JSON and plots")
    return parser
