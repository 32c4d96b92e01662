"""What the image installs: files with hashes alone, of the versions that are tested together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution

import pytest

from tests.docker.dockerfile import ROOT, steps_of

_LINE = re.compile(r"([A-Za-z0-9._-]+)==([\w.]+)(?:\+cpu)? --hash=sha256:[0-9a-f]{64}")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = (line.partition("#")[0].strip().split("==") for line in lines if not line.startswith("#"))
    return {canonical(name): version for name, version in pins}


def locked(name: str) -> dict[str, str]:
    """Return versions; raises `AssertionError` for a line that has no hash."""
    found = {}
    for line in (ROOT / "docker" / name).read_text().splitlines():
        if not line.startswith(("#", "-r requirements.txt")):
            match = _LINE.fullmatch(line)
            assert match is not None, line
            found[canonical(match[1])] = match[2]
    return found


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-cpu.txt", "requirements-cuda.txt"])
def test_hashed_versions_are_those_of_the_constraints(name: str) -> None:
    pins = constraints()
    assert {package: version for package, version in locked(name).items() if pins.get(package) != version} == {}


def test_torch_is_another_file_for_cpus_and_for_cuda() -> None:
    common, cpu, cuda = (locked(f"requirements{kind}.txt") for kind in ("", "-cpu", "-cuda"))
    assert cpu.keys() == {"torch"}
    assert {"torch", "triton", "nvidia-cublas"} <= cuda.keys()
    assert not common.keys() & cuda.keys()
    assert re.search(r"^torch==\S+\+cpu ", (ROOT / "docker" / "requirements-cpu.txt").read_text(), re.MULTILINE)


def needed(name: str, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield what a package that is installed here needs on this platform."""
    from packaging.requirements import Requirement

    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            yield canonical(requirement.name), frozenset(requirement.extras)


def test_everything_that_is_needed_has_its_hash() -> None:
    """With `--require-hashes` pip refuses a requirement that has none, so the image would not be built."""
    common, waiting, seen = locked("requirements.txt"), [("mneme", frozenset[str]())], set[tuple[str, frozenset[str]]]()
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        try:
            waiting += needed(*each)
        except PackageNotFoundError:
            pytest.fail(f"{each[0]} is not installed here, so what it needs is not known")
    names = {name for name, _ in seen}
    kind = "cuda" if "triton" in names else "cpu"  # the build of torch that is here
    assert names - common.keys() - locked(f"requirements-{kind}.txt").keys() == {"mneme"}
    assert "setuptools" in common  # the project itself is built without a build environment of its own


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_image_installs_nothing_without_a_hash(target: str) -> None:
    commands = [step.text for step in steps_of(target) if step.keyword == "RUN" and "pip " in step.text]
    assert len(commands) == 3
    for command in commands:
        assert command.startswith("pip install ")
        assert "--require-hashes" in command or {"--no-index", "--no-deps", "--no-build-isolation"} <= {
            *command.split()
        }
