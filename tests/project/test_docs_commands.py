"""What README, docs and examples tell one to run is run, or is read by what would run it; names in them are there."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from mneme.cluster.cli import main as command_line
from mneme.cluster.config import load_config
from tests.cluster.api_fixtures import api
from tests.cluster.real_engines import over
from tests.k8s.renders import CHART

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(page for page in sorted(ROOT.glob("*.md")) if page.name != "CHANGELOG.md"),  # it names what went
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

pytestmark = pytest.mark.lab

PICTURES = {"text", "mermaid"}
ELSEWHERE = {  # languages whose blocks are run by tests of their own
    ("README.md", "python"): "tests/project/test_docs.py",
    ("from-vllm.md", "python"): "tests/project/test_docs.py",
    ("agents.md", "toml"): "tests/project/test_docs.py",
    ("tools.md", "python"): "tests/replicas/text/test_dialects.py",
}
# Programs that are not ours and not here; of `helm` what it would render is looked at, of `docker` tests/docker.
OTHERS = {"claude", "codex", "vllm", "guidellm", "aiperf", "kubectl", "docker", "pip"}
STANDS_FOR = {
    "MODEL": "mneme-tiny", "HOST": "http://127.0.0.1:8000", "FOLDER": ".", "NAME": "hash", "R": "1", "N": "2"
}  # fmt: skip
INCOMPLETE = r"required|expected one argument"  # what the parser says of a command that the text only names


class Command(NamedTuple):
    page: str
    words: list[str]
    is_named: bool  # within the text, maybe without its arguments

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def blocks() -> list[tuple[str, str, str]]:
    """(page, language, text) of each block."""
    found = ((page, re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)) for page in PAGES)
    return [(page.name, language, text) for page, each in found for language, text in each]


def lines() -> list[tuple[str, str, bool]]:
    """(page, line, whether it stands within the text) of all that a reader is told to type."""
    found = []
    for name, language, text in blocks():
        if not language:
            found += [(name, line.removeprefix("$ "), False) for line in re.sub(r"\\\n\s*", "", text).splitlines()]
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        told = r"`((?:\.venv/bin/)?(?:mneme|make|curl|helm) [^`]+)`"
        found += [(page.name, " ".join(each.split()), True) for each in re.findall(told, prose)]
    return found


def commands() -> list[Command]:
    """Each command, a line with alternatives (`a|b`) as several; a line that shows only what may follow is none."""
    found = []
    for page, line, is_named in lines():
        if re.search(r"\[[A-Z-]|\.\.\.$|^mneme-\.\.\.", line) or "<that index>" in line:
            continue
        for part in re.split(r" \| (?=xargs)", re.sub(r"\s+#.*", "", line)):
            words = shlex.split(part)
            split = [each.split("|") if re.fullmatch(r"[a-z]+(\|[a-z]+)+", each) else [each] for each in words]
            found += [Command(page, [*each], is_named) for each in itertools.product(*split) if each]
    return found


def of_program(name: str) -> list[Command]:
    return [each for each in commands() if Path(each.words[0]).name == name]


def filled_in(words: list[str], file: Path) -> list[str]:
    """What stands for something of the reader's, as something that is here."""
    stands_for = {**STANDS_FOR, "FILE": str(file)}
    return [re.sub(r"\b(MODEL|HOST|FOLDER|NAME|FILE|R|N)\b", lambda each: stands_for[each[0]], word) for word in words]


def test_a_block_is_a_picture_or_is_run() -> None:
    known = {*PICTURES, "yaml", "json", ""}
    assert [each[:2] for each in blocks() if each[1] not in known and each[:2] not in ELSEWHERE] == []
    programs = {Path(each.words[0]).name for each in commands()}
    assert programs <= {"mneme", "make", "curl", "helm", "xargs", "python", *OTHERS}


@pytest.mark.parametrize("command", of_program("mneme"), ids=str)
def test_a_command_of_mneme_is_taken(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parser alone is asked, but of `serve` its configuration too: running would start servers."""
    file = tmp_path / "file.yaml"
    file.write_text("replicas: 1\n")
    (tmp_path / "keys.yaml").write_text("keys: []\n")
    monkeypatch.chdir(tmp_path)
    argv = filled_in(command.words[1:], file)
    argv = argv[: argv.index("<")] if "<" in argv else argv  # what it reads
    status: Any = 0
    try:
        if argv[:1] == ["serve"]:
            status = command_line.main([*argv, "--print-config"])
        else:
            command_line.make_parser(argv).parse_args(argv)
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr().err
    assert status == 0 or (command.is_named and re.search(INCOMPLETE, said)), said


@pytest.mark.parametrize("command", of_program("curl"), ids=str)
def test_a_request_is_answered(command: Command) -> None:
    words = filled_in(command.words, Path("file"))
    (url,) = (each for each in words[1:] if each.startswith("http://"))
    given = dict(itertools.pairwise(words))
    body = json.loads(given["-d"].replace("smollm2", "tiny")) if "-d" in given else None
    method = given.get("-X", "GET" if body is None else "POST")
    path = url.removeprefix("http://127.0.0.1:8000").replace("/ID", "/none")
    with over() as (client, _):
        response = client.request(method, path, json=body)
    assert response.status_code == 200 or response.json()["error"]["code"] == "request_not_found", response.text


def test_a_target_of_make_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)) | set(re.findall(r"\bgpu-[a-z]+", makefile))
    named = {word for each in of_program("make") for word in each.words[1:2] if "=" not in word}
    assert named <= targets


@pytest.mark.skipif(CHART["tool"]("helm") is None, reason="no helm; `make chart-tools` gets one")
@pytest.mark.parametrize("command", [each for each in of_program("helm") if "k8s/chart" in each.words], ids=str)
def test_what_helm_is_told_is_rendered(command: Command) -> None:
    options = [each for each in command.words[2:] if each != "--reuse-values"]
    helm = [CHART["tool"]("helm"), "template", *options]
    done = subprocess.run(helm, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", [text for _, language, text in blocks() if language == "yaml"])
def test_a_configuration_is_taken(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mneme.yaml"
    file.write_text(text)
    assert load_config(file, [], {}).as_mapping()


@pytest.mark.parametrize("text", [text for _, language, text in blocks() if language == "json"])
def test_a_body_is_answered(text: str) -> None:
    body: dict[str, Any] = {**json.loads(text), "model": "tiny"}
    assert api().post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_and_metrics_that_a_page_names_are_there(page: Path) -> None:
    config, metrics = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("config", "metrics"))
    text = page.read_text()
    options = set(re.findall(r"`((?:engine|cache|router|ray|http|ingress|autoscale)\.[a-z_.]+)(?:`|[:=])", text))
    assert {each for each in options if f"`{each}" not in config} == set()
    families = set(re.findall(r"\bmneme_[a-z_]+[a-z]\b", text))
    plain = {re.sub(r"_(bucket|sum|count)$", "", each) for each in families}
    assert {each for each in plain if f"`{each}" not in metrics} - {"mneme_serve_svc"} == set()


def test_alerts_lead_to_sections_of_the_runbook() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    rules = yaml.safe_load((ROOT / "k8s" / "chart" / "files" / "alerts.yaml").read_text())["groups"][0]["rules"]
    anchors = {each.lower().replace(" ", "-") for each in re.findall(r"^## (.+)$", runbook, re.MULTILINE)}
    for rule in rules:
        url, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert url == "docs/runbook.md"
        assert anchor in anchors, rule["alert"]
        assert re.search(rf"`{rule['alert']}`.* \| .*\(#{anchor}\)", runbook), rule["alert"]
