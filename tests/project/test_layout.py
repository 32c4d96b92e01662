"""The repository's shape: linked folders, the direction of imports, sizes, and what the project must not say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "replicas", "cachetier", "router", "cluster")
# Who may import whom: cluster -> {router, replicas} -> cachetier -> kernels, replicas -> kernels; all -> mneme.errors,
# .config.
ALLOWED = {
    "kernels": set(),
    "cachetier": {"kernels"},
    "replicas": {"kernels", "cachetier"},
    "router": {"cachetier", "replicas"},
    "cluster": {"router", "replicas", "cachetier"},
}
# Modules where Ray may be imported, besides all of cluster/; none but these and cluster/ imports them.
RAY_MODULE = re.compile(r"router/serve_router\.py|cachetier/ray_\w+\.py")


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


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
            assert parts[1] == folder or parts[1] in ALLOWED[folder], name
        if parts[0] == "ray" or RAY_MODULE.fullmatch("/".join(parts[1:3]) + ".py"):
            assert folder == "cluster" or RAY_MODULE.fullmatch(str(path.relative_to(ROOT))), name
        if parts[0] == "triton":
            assert folder == "kernels", name


@pytest.mark.parametrize("path", [*python_files(*FOLDERS), *python_files("src/mneme")], ids=ids)
def test_no_bytes_are_executed(path: Path) -> None:
    """No pickle, no torch.load, no eval on anything that is read from disk or the network."""
    if path.relative_to(ROOT).parts[:2] == ("src", "mneme") and path.is_symlink():
        return
    assert not imported_modules(path) & {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "torch.load"}, f"{path}:{node.lineno} {called}"


def test_the_offline_api_needs_no_ray() -> None:
    code = (
        "import sys; from mneme import LLM; "
        "print(bool(LLM('mneme-tiny').generate(['Hello'])[0].outputs[0].token_ids), 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["True", "False"], done.stderr


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
