"""The command line: `mneme serve | chat | doctor | simulate | cache`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mneme.errors import MnemeError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0, 1 for a failed check, 2 for what the user must change."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except MnemeError as error:
        print(f"mneme {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    from mneme.cluster.cache_command import add_cache_arguments
    from mneme.cluster.cache_command import cache as run_cache
    from mneme.cluster.simulate_command import add_simulate_arguments
    from mneme.cluster.simulate_command import simulate as run_simulation
    from mneme.cluster.terminal_chat import add_chat_arguments, run_chat

    parser = argparse.ArgumentParser(prog="mneme", description="An LLM serving cluster on its own engine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve an OpenAI-compatible API on this machine")
    _add_serve_arguments(serve)
    serve.set_defaults(run=_serve)

    chat = commands.add_parser("chat", help="talk to a server in the terminal")
    add_chat_arguments(chat)
    chat.set_defaults(run=run_chat)

    doctor = commands.add_parser("doctor", help="what this machine has, and what would keep a cluster from starting")
    doctor.add_argument("--port", type=int, default=8000, help="the port that `mneme serve` would use")
    doctor.add_argument("--json", action="store_true", help="one line of JSON")
    doctor.set_defaults(run=_doctor)

    simulate = commands.add_parser("simulate", help="what a cache would find of a trace, without running a model")
    add_simulate_arguments(simulate)
    simulate.set_defaults(run=run_simulation)

    cache = commands.add_parser("cache", help="what the disk tier's folder holds; checks and removes it")
    add_cache_arguments(cache)
    cache.set_defaults(run=run_cache)
    return parser


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="mneme-tiny (the default) or a Hugging Face model directory")
    parser.add_argument("--replicas", type=int, help="engine replicas (default 2)")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 8000)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a YAML file with the cluster's configuration")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one key of it, such as engine.dtype=float32"
    )


def _serve(args: argparse.Namespace) -> int:
    from mneme.cluster.config import load_config
    from mneme.cluster.serve_command import serve

    given = {key: getattr(args, key) for key in ("model", "replicas", "host", "port")}
    overrides = {key: value for key, value in given.items() if value is not None}
    return serve(load_config(args.config, args.set, overrides))


def _doctor(args: argparse.Namespace) -> int:
    from mneme.cluster.doctor_command import doctor

    return doctor(port=args.port, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
