"""No byte from a disk or a network is executed, mapped, or given to a parser that may do as the bytes say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "cachetier"
MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "mmap"}
NAMES = {"eval", "exec", "compile", "__import__", "import_module"}
# Loaders of whatever library, and Arrow's readers: a chunk file is read by its own header alone.
LIBRARIES = ("torch", "np", "numpy", "yaml", "joblib")
LOADERS = {"load", "unsafe_load", "full_load", "fromfile", "memmap"}
ARROW = {"open_file", "open_stream", "read_message", "read_schema", "read_record_batch", "memory_map", "read_tensor"}
ARROW |= {"RecordBatchFileReader", "RecordBatchStreamReader", "deserialize_pandas", "deserialize"}


def is_forbidden(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] in MODULES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        top = str(node.module).split(".")[0]
        return top in MODULES or bool(names & (NAMES | ARROW)) or (top in LIBRARIES and bool(names & LOADERS))
    if isinstance(node, ast.Name):
        return node.id in NAMES
    if isinstance(node, ast.Attribute):
        top = ast.unparse(node).split(".")[0]
        return node.attr in ARROW | {"import_module"} or (node.attr in LOADERS and top in LIBRARIES)
    return False


def faults(source: str) -> list[str]:
    return [ast.unparse(node) for node in ast.walk(ast.parse(source)) if is_forbidden(node)]


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.name)
def test_no_module_of_the_tier_parses_what_it_must_not(path: Path) -> None:
    assert not faults(path.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import mmap",
        "eval('1')",
        "torch.load(path)",
        "numpy.load(path)",
        "pa.ipc.open_file(path)",
        "pa.memory_map(path)",
        "from torch import load",
        "from pyarrow.ipc import open_stream",
    ],
)
def test_the_test_finds_what_it_looks_for(source: str) -> None:
    assert faults(source)
