"""The command line: `mneme serve | chat | bench | doctor | simulate | cache | keys | quality`.

`LABORATORY`'s commands come from entry points (group `mneme.commands`), each loaded only when it is named. One adds its
arguments to a parser, with `run` among the defaults.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_type_hints

from mneme.errors import ConfigError, MnemeError
from mneme.replicas.config import EngineConfig
from mneme.replicas.vllm_options import FOREIGN, engine_keys
from mneme.version import __version__

if TYPE_CHECKING:
    from mneme.cluster.config import ClusterConfig

_EXAMPLES = """\
examples:
  mneme serve                                          the embedded model on http://127.0.0.1:8000
  mneme serve ./Llama-3.1-8B --replicas 4 --port 8080  a Hugging Face directory
  mneme serve --local ./Llama-3.1-8B                   one engine in one process, without Ray: in seconds
  mneme serve --config mneme.yaml --set engine.dtype=bfloat16
  mneme chat --url http://127.0.0.1:8000/v1            talk to it in the terminal
  mneme bench serve --workload rag --concurrency 16    load on it: latencies, tokens per second, cached share
  mneme bench autoscale --peak 8                       load that rises and falls: do replicas follow, does KV stay
  mneme quality ./Llama-3.1-8B --task musique.jsonl    what reusing documents costs in quality
`mneme COMMAND --help` says more of each."""
LABORATORY = {  # what measures and plays, and what `mneme --help` says of it
    "chat": "talk to a server in the terminal",
    "top": "what a server does: replicas, tiers, requests, again and again",
    "bench": "load on a running server, and what its users would see",
    "simulate": "what a trace would do to a cache or a cluster, without a model",
    "quality": "what reusing documents in place does to a model's answers",
}


def _dtype(text: str) -> str:
    return {"half": "float16", "float": "float32"}.get(text, text)  # as vLLM calls them, too


# Options of `vllm serve` that have an equivalent here.
VLLM_OPTIONS: tuple[tuple[str, str, Callable[[str], object], str, str], ...] = (  # option, our key, type, metavar, help
    ("--served-model-name", "served_name", str, "NAME", "what clients call the model, by one name or several"),
    ("--generation-config", "engine.generation_config", str, "USE", "auto: as generation_config.json samples; none"),
    ("--api-key", "http.api_keys", str, "KEY", "the key that clients must send"),
    ("--dtype", "engine.dtype", _dtype, "DTYPE", "auto, float32, bfloat16 or float16"),
    ("--tool-call-parser", "http.tool_call_parser", str, "NAME", "auto, none, hermes, qwen3_coder ...: docs/tools.md"),
    ("--reasoning-parser", "http.reasoning_parser", str, "NAME", "auto, none, qwen3, openai_gptoss ...: docs/tools.md"),
    ("--tool-parser-plugin", "http.tool_parser_plugin", str, "FILE", "a Python file with formats of one's own"),
    ("--max-model-len", "engine.max_context", int, "N", "tokens of context at most"),
    ("--max-num-seqs", "engine.max_running", int, "N", "requests that run at once"),
    ("--max-num-batched-tokens", "engine.max_batch_tokens", int, "N", "tokens computed in a step"),
    ("--block-size", "engine.page_size", int, "N", "tokens in a KV page"),
    ("--kv-cache-memory-bytes", "engine.kv_cache_bytes", int, "N", "instead of a share of the device's free memory"),
)
_FOREIGN = "vllm."  # before the names of options of vLLM's that are none here


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0, 1 for a failed check, 2 for what the user must change."""
    parser = make_parser(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        status: int = args.run(args)
    except MnemeError as error:
        print(f"mneme {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and of an unknown option which of its own is most like it."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        namespace, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            close = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            self.error(f"unknown: {' '.join(unknown)}{''.join(f' (did you mean {each}?)' for each in close)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists what there is\n")


def make_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The commands. The laboratory's have their options if `argv` names them, or asks for all to complete them."""
    import shtab

    from mneme.cluster.cli.cache import add_cache_arguments
    from mneme.cluster.cli.cache import cache as run_cache
    from mneme.cluster.cli.keys import add_keys_arguments
    from mneme.cluster.cli.keys import keys as run_keys
    from mneme.cluster.cli.models import add_models_arguments
    from mneme.cluster.cli.models import models as run_models

    parser = _Parser(
        prog="mneme",
        description="An LLM serving cluster that never computes the same attention twice.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mneme {__version__}")
    shtab.add_argument_to(parser, "--print-completion", help="print a completion script for this shell")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    named = next((each for each in argv if not each.startswith("-")), None)
    before = argv[: argv.index(named)] if named is not None else argv
    is_completed = any(each.startswith("--p") for each in before)  # --print-completion has the options of all commands

    def add_of_laboratory(name: str) -> None:
        command = commands.add_parser(name, help=LABORATORY[name])
        missing = _load(name, command) if is_completed or name == named else None
        if missing is not None and name == named:
            command.exit(2, f"mneme {name}: {missing}\n")

    serve = commands.add_parser("serve", help="serve an OpenAI-compatible API on this machine")
    _add_serve_arguments(serve)
    serve.set_defaults(run=_serve)

    add_of_laboratory("chat")
    add_of_laboratory("top")
    add_of_laboratory("bench")

    doctor = commands.add_parser("doctor", help="what this machine has, and what would keep a cluster from starting")
    doctor.add_argument(
        "model", nargs="?", help="say of this model, too, whether it is served here; as `serve` names it"
    )
    doctor.add_argument("--port", type=int, default=8000, metavar="N", help="the port of `mneme serve` (default 8000)")
    doctor.add_argument("--json", action="store_true", help="one line of JSON")
    doctor.set_defaults(run=_doctor)

    add_of_laboratory("simulate")

    cache = commands.add_parser("cache", help="what the disk tier's folder holds, and whether it is sound")
    add_cache_arguments(cache)
    cache.set_defaults(run=run_cache)

    models = commands.add_parser("models", help="which models are known, here and served, and what memory they take")
    add_models_arguments(models)
    models.set_defaults(run=run_models)

    keys = commands.add_parser("keys", help="the API keys of a server: who may call, and how much")
    add_keys_arguments(keys)
    keys.set_defaults(run=run_keys)

    add_of_laboratory("quality")
    return parser


def _load(name: str, command: argparse.ArgumentParser) -> str | None:
    """Let a command of the laboratory add its arguments; return what to install if it cannot."""
    found = [*entry_points(group="mneme.commands", name=name)]
    if not found:
        return "its entry point is not installed: pip install 'mneme[lab]', or in a checkout make setup"
    try:
        found[0].load()(command)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("mneme.") and not error.name.startswith("mneme.lab"):
            raise
        return f"needs {error.name}, which is not installed: pip install 'mneme[lab]'"
    return None


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="mneme-tiny (the default), smollm2, a directory, a GGUF file, or a name on the hub"
    )
    parser.add_argument(
        "--local", action="store_true", help="one engine and its API in this process, without Ray: ready in seconds"
    )
    parser.add_argument(
        "--replicas",
        metavar="N|MIN..MAX",
        help="engine replicas, or the bounds of autoscaling (default: one for each GPU, else two)",
    )
    parser.add_argument(
        "--address",
        dest="ray.address",
        metavar="auto|HOST:PORT",
        help="join this Ray cluster instead of starting one: replicas spread over its nodes",
    )
    parser.add_argument("--host", metavar="ADDRESS", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, metavar="N", help="port to listen on (default 8000)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a YAML file with the cluster's configuration")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one key of it, such as engine.dtype=float32"
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the configuration, every key with its value, and do not serve",
    )
    parser.add_argument(
        "--log-format", choices=("text", "json"), help="of log lines; json: an object each, one for each request"
    )
    same = parser.add_argument_group("options as vLLM's, each in place of a key of --set")
    hints = get_type_hints(EngineConfig)
    for option, key, kind, metavar, text in VLLM_OPTIONS:
        choices = get_args(hints[key.removeprefix("engine.")]) if option in ("--dtype", "--generation-config") else None
        more: Any = {"nargs": "+", "action": "extend"} if key == "served_name" else {}
        same.add_argument(option, dest=key, type=kind, choices=choices, metavar=metavar, help=f"{text} ({key})", **more)
    for name, foreign in FOREIGN.items():
        option = f"--{name.replace('_', '-')}"
        if option not in {known for known, *_ in VLLM_OPTIONS}:
            action = argparse.BooleanOptionalAction if foreign.is_flag else "store"
            short = [f"-{name[0]}p"] if name.endswith("_parallel_size") else []
            same.add_argument(option, *short, dest=_FOREIGN + name, action=action, help=argparse.SUPPRESS)


def _serve(args: argparse.Namespace) -> int:
    from mneme.cachetier.node.own_disk import take_own_disk
    from mneme.cluster.config import load_config

    keys = ("model", "ray.address", "host", "port", "log_format", *(key for _, key, *_ in VLLM_OPTIONS))
    given: dict[str, Any] = {key: getattr(args, key) for key in keys if getattr(args, key) is not None}
    if args.replicas is not None:
        given |= _replicas(args.replicas)
    names = given.get("served_name", [])
    if args.model is None and len(names) > 1 and Path(names[-1]).is_dir():  # an option of several values took it
        raise ConfigError(f"--served-model-name: {names[-1]} is a directory; the model stands before this option")
    if "http.api_keys" in given:
        given["http.api_keys"] = [given["http.api_keys"]]
    load = partial(load_config, args.config, args.set, given | _foreign_keys(args))
    if args.print_config:
        return _print_config(load)
    with ExitStack() as held:  # until this process ends
        own_disk = partial(take_own_disk, held, lambda why: print(f"mneme serve: {why}", file=sys.stderr))
        return _serve_as(args, load(own_disk))


def _print_config(load: Callable[[Callable[[], None]], ClusterConfig]) -> int:
    """Print what holds. Of a disk that nobody named nothing: it is taken at a start, and null would be none."""
    import yaml

    is_named = True

    def unnamed() -> None:
        nonlocal is_named
        is_named = False

    shown = load(unnamed).as_mapping()
    if not is_named:
        del shown["cache"]["disk"]
    print(yaml.safe_dump(shown, sort_keys=False), end="")
    return 0


def _serve_as(args: argparse.Namespace, config: ClusterConfig) -> int:
    from mneme.cluster.cli.serve import serve, serve_local

    return serve_local(config) if args.local else serve(config)


def _foreign_keys(args: argparse.Namespace) -> dict[str, Any]:
    """Return what options of vLLM's set, and say of those that set nothing that they do not. Raises `ConfigError`."""
    given: dict[str, Any] = {}
    for name in FOREIGN:
        value = getattr(args, _FOREIGN + name, None)
        if value is None:
            continue
        option = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        keys = engine_keys(name, value, option, "--set engine.{}=...")
        given |= {f"engine.{key}": each for key, each in keys.items()}
        if not keys:
            print(f"mneme serve: {option} changes nothing: it is so anyway", file=sys.stderr)
    return given


def _replicas(text: str) -> dict[str, Any]:
    """Read a number, or a range as 1..3; either takes the place of what the file says. Raises `ConfigError`."""
    from mneme.router.autoscaler import AutoscaleConfig

    if text.isdecimal():
        return {"replicas": int(text), "autoscale": None}
    return {"replicas": None, **{f"autoscale.{key}": value for key, value in AutoscaleConfig.of_range(text).items()}}


def _doctor(args: argparse.Namespace) -> int:
    from mneme.cluster.cli.doctor import doctor

    return doctor(port=args.port, as_json=args.json, model=args.model)


if __name__ == "__main__":
    sys.exit(main())
