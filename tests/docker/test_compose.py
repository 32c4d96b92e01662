"""docker/compose.yaml and the files that it mounts fit each other; dashboards and alerts ask for what /metrics has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from mneme.cluster.cli.main import main
from tests.cluster.api_fixtures import CHAT, api
from tests.cluster.metrics.test_cache_metrics import with_cache
from tests.cluster.real_engines import TwoEngines, over
from tests.docker.dockerfile import DOCKERFILE, ROOT, last, steps_of

pytestmark = pytest.mark.http
FOLDER = ROOT / "docker"
FILES = ROOT / "k8s" / "chart" / "files"
PROMQL = {"absent", "by", "histogram_quantile", "max", "rate", "sum", "topk"}
# Words of a query, but for strings, numbers, ranges and variables.
_WORD = re.compile(r'"[^"]*"|\[[^\]]*\]|(?<![\w.$])([a-zA-Z_:][\w:]*)')
_MATCHER = re.compile(r'(\w+)\s*(=~|=)\s*"([^"]*)"')


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.fixture
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = load("compose.yaml")["services"]
    return found


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """What is mounted, by the path that it has in the container."""
    return {target: source for source, target in (each.split(":")[:2] for each in service["volumes"])}


def test_what_is_mounted_is_there(services: dict[str, dict[str, Any]]) -> None:
    volumes = load("compose.yaml")["volumes"]
    found = [source for service in services.values() for source in mounts(service).values()]
    files = [source for source in found if source.startswith(".")]
    assert len(files) == 5
    assert [source for source in files if not (FOLDER / source).exists()] == []
    assert {source for source in found if source not in files} == {*volumes}


def test_no_port_is_open_beyond_this_machine(services: dict[str, dict[str, Any]]) -> None:
    for service in services.values():
        assert [port for port in service["ports"] if not port.startswith("127.0.0.1:")] == []


def test_the_image_is_the_one_of_the_dockerfile(services: dict[str, dict[str, Any]]) -> None:
    build = services["mneme"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert ROOT / build["dockerfile"] == DOCKERFILE
    made = " ".join(step.text for step in steps_of(build["target"]) if "install -d" in step.text)
    assert made
    assert [folder for folder in mounts(services["mneme"]) if folder not in made] == []  # else they would be root's


def test_the_server_is_started_as_it_can_be(
    services: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    variable = re.compile(r"\$\{\w+:-(.*)\}")
    arguments = [variable.sub(r"\1", each) for each in services["mneme"]["command"]]
    assert main([*arguments, "--print-config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["model"], config["host"]) == ("mneme-tiny", "0.0.0.0")
    assert config["cache"]["disk"]["folder"] in mounts(services["mneme"])


def test_prometheus_scrapes_the_server_and_grafana_asks_prometheus(services: dict[str, dict[str, Any]]) -> None:
    config = load("prometheus.yml")
    assert mounts(services["prometheus"])["/etc/prometheus/prometheus.yml"] == "./prometheus.yml"
    (job,) = config["scrape_configs"]
    ((target,),) = (each["targets"] for each in job["static_configs"])
    assert target == f"mneme:{last(steps_of('cpu'), 'EXPOSE')}"
    assert api().get(job["metrics_path"]).status_code == 200
    (source,) = load("grafana/datasource.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    assert [path for path in config["rule_files"] if path not in mounts(services["prometheus"])] == []
    (provider,) = load("grafana/dashboards.yaml")["providers"]
    at = {source: Path(target) for target, source in mounts(services["grafana"]).items()}
    dashboards = at["../k8s/chart/files/dashboards"]
    assert dashboards == Path(provider["options"]["path"])
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (FILES / "dashboards" / Path(home).relative_to(dashboards)).is_file()
    assert {each["datasource"]["uid"] for panel in panels() for each in (panel, *panel["targets"])} == {source["uid"]}


def dashboards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((FILES / "dashboards").glob("*.json"))]


def panels() -> list[dict[str, Any]]:
    return [panel for dashboard in dashboards() for panel in dashboard["panels"]]


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def asked(query: str) -> tuple[set[str], dict[str, set[str]]]:
    """Return the metrics that a query names, and its labels with the values that they are compared with.

    Raises ValueError for one that Prometheus would not take.
    """
    promql_parser.parse(query.replace("$__rate_interval", "5m"))
    values_by_label = {label: set(values.split("|")) for label, _, values in _MATCHER.findall(query)}
    for labels in re.findall(r"\bby \(([^)]*)\)", query):
        values_by_label = {label.strip(): set() for label in labels.split(",")} | values_by_label
    return {*filter(None, _WORD.findall(query))} - PROMQL - values_by_label.keys(), values_by_label


Page = dict[str, dict[str, set[str]]]  # names of samples, with the values of their labels


@pytest.fixture(scope="module")
def page() -> Page:
    """As two engines with a cache tier and a GPU have it, after an answer."""
    with over() as (client, engines):
        with_cache(engines)
        on_gpus(engines)
        client.post("/v1/chat/completions", json=CHAT).raise_for_status()
        text = client.get("/metrics").raise_for_status().text
    found: Page = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                values.setdefault(label, set()).add(value)
    return found


def on_gpus(engines: TwoEngines) -> None:
    """As replicas with GPUs say their figures, where Serve says how many there should be."""
    plain = engines.stats

    async def stats() -> dict[str, dict[str, Any]]:
        gpu = {"gpu": "0", "problem": None}
        return {name: {**figures, "gpu": gpu} for name, figures in (await plain()).items()}

    engines.stats = stats  # type: ignore[method-assign]
    engines.num_wanted = lambda: 2  # type: ignore[method-assign]


def missing(query: str, page: Page) -> set[str]:
    """Return what a query names that the page has not: metrics, their labels, values of these."""
    names, values_by_label = asked(query)
    found = {name for name in names if name not in page}
    for name in names - found:
        for label, values in values_by_label.items():
            if label not in page[name]:
                found.add(f"{name}: {label}")
            found |= {f"{name}: {label}={value}" for value in values - page[name].get(label, values)}
    return found


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_what_a_panel_asks_for_is_on_the_page(panel: dict[str, Any], page: Page) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        names, values_by_label = asked(target["expr"])
        assert names
        assert missing(target["expr"], page) == set()
        assert {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])} <= values_by_label.keys()


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_what_an_alert_asks_for_is_on_the_page(alert: dict[str, Any], page: Page) -> None:
    names, values_by_label = asked(alert["expr"])
    assert names
    assert missing(alert["expr"], page) == set()
    assert {*re.findall(r"\{\{ \$labels\.(\w+) \}\}", alert["annotations"]["summary"])} <= values_by_label.keys()
    assert {*alert} == {"alert", "expr", "for", "labels", "annotations"}


def test_a_query_that_prometheus_would_not_take_is_seen() -> None:
    with pytest.raises(ValueError, match="unclosed"):
        asked("absent(mneme_ready")


def questions() -> list[str]:
    page = (ROOT / "docs" / "operations.md").read_text()
    return re.findall(r"^\| .+\? .*\| `([^`]+)` \|$", page, re.MULTILINE)


@pytest.mark.parametrize("query", questions())
def test_what_operators_ask_is_on_the_page(query: str, page: Page) -> None:
    assert asked(query)[0]
    assert missing(query, page) == set()
