"""Collect permissively licensed English for language modelling, split by document.

Two sources: CPython's own documentation texts and docstrings (PSF-2.0), read from the running
interpreter's standard library, and the PostgreSQL 15 manual (PostgreSQL licence), fetched as a Debian
package. Without apt the second source is left out, and the caller is told.
"""

import ast
import hashlib
import html
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

PACKAGE = "postgresql-doc-15"
MIN_CHARS = 200
HELD_OUT_PERCENT = 3
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "turtledemo", "lib2to3", "__pycache__"}
BLOCK_TAGS = {"p", "pre", "div", "li", "dt", "dd", "tr", "h1", "h2", "h3", "h4", "br", "table"}
HIDDEN_CLASSES = {"navheader", "navfooter", "toc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text that is wholly in the training part or wholly in the held-out part."""

    source: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Decided by a hash of the name alone, so the split survives changes of the corpus."""
        digest = hashlib.sha256(f"{self.source}/{self.name}".encode()).digest()
        return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


class _ManualPage(HTMLParser):
    """Text of one manual page without its navigation."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden_depth = 0
        self._pre_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"head", "div"} and (self._hidden_depth or self._is_hidden(tag, attrs)):
            self._hidden_depth += 1
        self._pre_depth += tag == "pre"
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in {"head", "div"} and self._hidden_depth:
            self._hidden_depth -= 1
        self._pre_depth -= tag == "pre"
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self._hidden_depth:
            self.parts.append(data if self._pre_depth else re.sub(r"\s+", " ", data))

    def _break(self, tag: str) -> None:
        if tag in BLOCK_TAGS and not self._hidden_depth:
            self.parts.append("\n")

    @staticmethod
    def _is_hidden(tag: str, attrs: list[tuple[str, str | None]]) -> bool:
        return tag == "head" or (dict(attrs).get("class") or "") in HIDDEN_CLASSES


def tidy(text: str) -> str:
    """Plain ASCII-leaning text with single spaces in prose and at most one empty line."""
    text = html.unescape(text).replace("\xa0", " ").replace("“", '"').replace("”", '"')
    text = text.replace("\u2019", "'").replace("—", "-").expandtabs(4)
    lines = [re.sub(r"(?<=\S) +", " ", line).rstrip() for line in text.split("\n")]
    lines = [line[1:] if re.match(r" \S", line) else line for line in lines]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def fetch_manual(folder: Path) -> Path | None:
    """Unpacked package below `folder`, downloaded with apt if need be; None where that is impossible."""
    unpacked = folder / PACKAGE
    if unpacked.is_dir():
        return unpacked
    folder.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, check=True, capture_output=True)
        package = next(folder.glob(f"{PACKAGE}_*.deb"))
        subprocess.run(["dpkg", "-x", str(package), str(unpacked)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError, StopIteration) as error:
        print(f"corpus: no {PACKAGE} ({error}); the standard library alone is used", file=sys.stderr)
        return None
    return unpacked


def manual_documents(unpacked: Path) -> Iterator[Document]:
    for path in sorted(unpacked.rglob("*.html")):
        page = _ManualPage()
        page.feed(path.read_text(encoding="utf-8"))
        yield Document(source=PACKAGE, name=path.name, text=tidy("".join(page.parts)))


def docstrings(path: Path) -> str:
    """All docstrings of a module, in order, each under the name of its owner."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return ""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        (getattr(node, "name", path.stem), ast.get_docstring(node))
        for node in ast.walk(tree)
        if isinstance(node, owners)
    ]
    return "\n\n".join(f"{name}: {text}" for name, text in found if text)


def library_documents() -> Iterator[Document]:
    """Help topics and docstrings of the running interpreter."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield Document(source="cpython", name=f"topic/{name}", text=tidy(text))
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not SKIPPED_FOLDERS & set(relative.parts):
            yield Document(source="cpython", name=str(relative), text=tidy(docstrings(path)))


def collect(folder: Path, *, manual: bool = True) -> list[Document]:
    """All documents of useful length, in a fixed order."""
    documents = list(library_documents())
    unpacked = fetch_manual(folder) if manual else None
    if unpacked is not None:
        documents += manual_documents(unpacked)
    return [document for document in documents if len(document.text) >= MIN_CHARS]
