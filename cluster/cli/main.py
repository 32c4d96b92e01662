"""The command line: `mneme serve | chat | doctor | simulate | cache | quality`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from mneme.errors import MnemeError
from mneme.replicas.config import EngineConfig
from mneme.version import __version__

_EXAMPLES = """\
examples:
  mneme serve                                          the embedded model on http://127.0.0.1:8000
  mneme serve ./Llama-3.1-8B --replicas 4 --port 8080  a Hugging Face directory
  mneme serve --config mneme.yaml --set engine.dtype=bfloat16
  mneme chat --url http://127.0.0.1:8000/v1            talk to it in the terminal
  mneme quality ./Llama-3.1-8B --task musique.jsonl    what reusing documents costs in quality
`mneme COMMAND --help` says more of each."""
# Options of `vllm serve` that have an equivalent here.
_VLLM_OPTIONS: tuple[tuple[str, str, type, str, str], ...] = (  # option, our key, type, metavar, help
    ("--served-model-name", "served_name", str, "NAME", "what clients call the model"),
    ("--api-key", "http.api_keys", str, "KEY", "the key that clients must send"),
    ("--dtype", "engine.dtype", str, "DTYPE", "auto, float32, bfloat16 or float16"),
    ("--max-model-len", "engine.max_context", int, "N", "tokens of context at most"),
    ("--max-num-seqs", "engine.max_running", int, "N", "requests that run at once"),
    ("--max-num-batched-tokens", "engine.max_batch_tokens", int, "N", "tokens computed in a step"),
    ("--block-size", "engine.page_size", int, "N", "tokens in a KV page"),
    ("--kv-cache-memory-bytes", "engine.kv_cache_bytes", int, "N", "instead of a share of the device's free memory"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0, 1 for a failed check, 2 for what the user must change."""
    parser = _parser()
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


def _parser() -> argparse.ArgumentParser:
    import shtab

    from mneme.cluster.cli.cache import add_cache_arguments
    from mneme.cluster.cli.cache import cache as run_cache
    from mneme.cluster.cli.chat import add_chat_arguments, run_chat
    from mneme.cluster.cli.quality import add_quality_arguments
    from mneme.cluster.cli.quality import quality as run_quality
    from mneme.cluster.cli.simulate import add_simulate_arguments
    from mneme.cluster.cli.simulate import simulate as run_simulation

    parser = _Parser(
        prog="mneme",
        description="An LLM serving cluster that never computes the same attention twice.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mneme {__version__}")
    shtab.add_argument_to(parser, "--print-completion", help="print a completion script for this shell")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve an OpenAI-compatible API on this machine")
    _add_serve_arguments(serve)
    serve.set_defaults(run=_serve)

    chat = commands.add_parser("chat", help="talk to a server in the terminal")
    add_chat_arguments(chat)
    chat.set_defaults(run=run_chat)

    doctor = commands.add_parser("doctor", help="what this machine has, and what would keep a cluster from starting")
    doctor.add_argument("--port", type=int, default=8000, metavar="N", help="the port of `mneme serve` (default 8000)")
    doctor.add_argument("--json", action="store_true", help="one line of JSON")
    doctor.set_defaults(run=_doctor)

    simulate = commands.add_parser("simulate", help="what a cache would find of a trace, without running a model")
    add_simulate_arguments(simulate)
    simulate.set_defaults(run=run_simulation)

    cache = commands.add_parser("cache", help="what the disk tier's folder holds, and whether it is sound")
    add_cache_arguments(cache)
    cache.set_defaults(run=run_cache)

    quality = commands.add_parser("quality", help="what reusing documents in place does to a model's answers")
    add_quality_arguments(quality)
    quality.set_defaults(run=run_quality)
    return parser


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="mneme-tiny (the default) or a Hugging Face model directory")
    parser.add_argument(
        "--replicas", type=int, metavar="N", help="engine replicas (default: one for each GPU, else two)"
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
    same = parser.add_argument_group("options as vLLM's, each in place of a key of --set")
    for option, key, kind, metavar, text in _VLLM_OPTIONS:
        choices = get_args(get_type_hints(EngineConfig)["dtype"]) if option == "--dtype" else None
        same.add_argument(option, dest=key, type=kind, choices=choices, metavar=metavar, help=f"{text} ({key})")


def _serve(args: argparse.Namespace) -> int:
    from mneme.cluster.config import load_config

    keys = ("model", "replicas", "host", "port", *(key for _, key, *_ in _VLLM_OPTIONS))
    given: dict[str, Any] = {key: getattr(args, key) for key in keys if getattr(args, key) is not None}
    if "http.api_keys" in given:
        given["http.api_keys"] = [given["http.api_keys"]]
    config = load_config(args.config, args.set, given)
    if args.print_config:
        import yaml

        print(yaml.safe_dump(config.as_mapping(), sort_keys=False), end="")
        return 0
    from mneme.cluster.cli.serve import serve

    return serve(config)


def _doctor(args: argparse.Namespace) -> int:
    from mneme.cluster.cli.doctor import doctor

    return doctor(port=args.port, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
