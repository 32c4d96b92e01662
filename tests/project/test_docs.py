"""README and docs: their links lead somewhere, and README's example says what it is said to say."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mneme.errors import MnemeError
from tests.cluster.api_fixtures import get

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("[bckr]*/README.md"),
    *ROOT.glob("benchmarks/*/README.md"),
    *(ROOT / "docs").rglob("*.md"),
]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_local_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
                broken.append(f"{page.name}: {link}")
    assert not broken


@pytest.mark.parametrize("room", ["router", "replicas", "kernels", "cluster", "cachetier"])
def test_a_room_names_each_of_its_files_once(room: str) -> None:
    rows = re.findall(r"^\| (`[^|]+`) \| ", (ROOT / room / "README.md").read_text(), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([\w/]+\.\w+)`", row)]
    files = [path.relative_to(ROOT / room) for ext in ("py", "cpp", "h") for path in (ROOT / room).rglob(f"*.{ext}")]
    assert sorted(named) == sorted(str(path) for path in files if path.name != "__init__.py")


def test_the_tests_that_the_security_page_names_are_there() -> None:
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text())
    assert named
    assert [(path, name) for path, name in named if f"def {name}(" not in (ROOT / path).read_text()] == []


@pytest.mark.parametrize("page", ["README.md", "docs/from-vllm.md"])
def test_an_example_in_python_answers(page: str) -> None:
    (example,) = re.findall(r"```python\n(.+?)```", (ROOT / page).read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.strip()  # it is drawn, so not always the same


def test_the_lines_for_codex_name_a_provider_that_they_define() -> None:
    (text,) = re.findall(r"```toml\n(.+?)```", (ROOT / "docs" / "agents.md").read_text(), re.DOTALL)
    config = tomllib.loads(text)
    provider = config["model_providers"][config["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == ("http://127.0.0.1:8000/v1", "responses")


def test_the_sizes_of_models_are_those_of_their_shapes() -> None:
    rows = re.findall(
        r"^\| (\S+) \| (\d+) x (\d+) x (\d+) \| ([\d,]+) \| ([\d,]+)" + r" \| ([\d.,]+) GiB" * 3 + r" \|$",
        (ROOT / "docs/scaling.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) > 4
    for name, *cells in rows:
        layers, heads, size, token_bytes, of_a_gib, weights, device, node = (
            float(cell.replace(",", "")) for cell in cells
        )
        assert token_bytes == layers * heads * size * 4, name
        assert of_a_gib == 2**30 // token_bytes, name
        assert device == pytest.approx(weights + 8 * 8192 * token_bytes / 2**30, abs=0.06), name
        assert node == pytest.approx(8e6 * token_bytes / 2**30, abs=0.5), name


def test_the_api_page_names_every_route_and_error() -> None:
    page = (ROOT / "docs/api.md").read_text()
    routes = {
        f"{method.upper()} {path}"
        for path, methods in get("/openapi.json").json()["paths"].items()
        for method in methods
    }
    codes = {
        each.code for each in (MnemeError, *error_classes(MnemeError)) if each.http_status != 500 or each is MnemeError
    }
    assert {name for name in routes | codes if f"`{name}`" not in page} == set()
    assert set(re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", page)) == routes


def error_classes(root: type[MnemeError]) -> Iterator[type[MnemeError]]:
    for each in root.__subclasses__():
        yield each
        yield from error_classes(each)
