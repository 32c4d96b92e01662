"""docker/Dockerfile as data, and what a builder does with its steps, in a folder instead of a container."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
_SYSTEM = ("apt-get ", "useradd ")  # what begins so changes the operating system
_SAID = ("USER", "EXPOSE", "ENTRYPOINT", "CMD", "HEALTHCHECK")  # of the image: nothing is done when it is built


class Step(NamedTuple):
    keyword: str
    text: str


def steps_of(target: str) -> list[Step]:
    """Return the steps that make a target, those of the stages that it is made from first, each `FROM` too."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: dict[str, list[Step]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        step = Step(*line.split(maxsplit=1))
        if step.keyword == "FROM":
            base, _, name = step.text.partition(" AS ")
            stages[name] = list(stages.get(base, []))
        stages[name].append(step)
    return stages[target]


def last(steps: list[Step], keyword: str) -> str:
    return [step.text for step in steps if step.keyword == keyword][-1]


def command_of(steps: list[Step]) -> list[str]:
    """Return what a container of the image starts without arguments of its own."""
    return [*json.loads(last(steps, "ENTRYPOINT")), *json.loads(last(steps, "CMD"))]


def context() -> Iterator[Path]:
    """Yield what .dockerignore lets through, relative to the repository: files, and links to folders."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [(line.lstrip("!"), line.startswith("!")) for line in lines if line and not line.startswith("#")]

    def is_let_through(path: PurePosixPath) -> bool:
        """The last rule counts that matches the path or a folder above it."""
        tried = [path, *path.parents][:-1]
        matching = (wanted for rule, wanted in rules if any(_matches(each, rule) for each in tried))
        return [True, *matching][-1]

    def may_hold(folder: PurePosixPath) -> bool:
        return is_let_through(folder) or any(wanted and rule.startswith(f"{folder}/") for rule, wanted in rules)

    for name, folders, files in os.walk(ROOT):
        here = PurePosixPath(Path(name).relative_to(ROOT))
        links = [each for each in folders if Path(name, each).is_symlink()]
        yield from (Path(here / each) for each in (*files, *links) if is_let_through(here / each))
        folders[:] = [each for each in folders if each not in links and may_hold(here / each)]


def _matches(path: PurePosixPath, rule: str) -> bool:
    if rule.startswith("**/"):
        return fnmatch.fnmatchcase(path.name, rule.removeprefix("**/"))
    parts = PurePosixPath(rule).parts
    return len(parts) == len(path.parts) and all(map(fnmatch.fnmatchcase, path.parts, parts))


class Build:
    """Does steps one after the other: its `root` is the image's, a virtual environment stands for its Python.

    What changes the operating system is left out, and `/bin/sh` and all programs but Python's are this machine's.
    """

    def __init__(self, root: Path, python: Path, variables: Mapping[str, str]) -> None:
        """`python`: the folder of the environment's programs; `variables`: what every step has, and `ENV` adds to."""
        self.root = root
        self.environment = {**variables, "PATH": f"{python}:/usr/bin:/bin"}
        self.workdir = root
        self.left_out: list[Step] = []

    def do(self, step: Step) -> None:
        """Raise `AssertionError` for a command that fails, and for what is not known here."""
        if step.keyword == "WORKDIR":
            self.workdir = self.root / step.text.lstrip("/")
            self.workdir.mkdir(parents=True, exist_ok=True)
        elif step.keyword in ("ENV", "ARG"):
            name, _, value = step.text.partition("=")
            self.environment[name] = value
        elif step.keyword == "COPY":
            self._copy(*step.text.split())
        elif step.keyword == "RUN" and not step.text.startswith(_SYSTEM):
            self._run(step)
        else:
            assert step.keyword in ("FROM", "RUN", *_SAID), step
            self.left_out.append(step)

    def _copy(self, source: str, target: str) -> None:
        assert target == "." or target.endswith("/"), "a folder"
        found = [path for path in context() if source == "." or _matches(PurePosixPath(path), source)]
        assert found, f"COPY {source}: not in the context"
        for path in found:
            copied = self.workdir / target / (path if source == "." else path.name)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, copied, follow_symlinks=False)

    def _run(self, step: Step) -> None:
        command = ("/bin/sh", "-c", step.text)
        done = subprocess.run(
            command, cwd=self.workdir, env=self.environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"RUN {step.text}: {done.stdout} {done.stderr}"
