"""`vllm bench serve` as a process that stays: a line of arguments (a JSON list) in, a line of figures out.

To import it takes twenty seconds; so a comparison of short turns starts it once. Run with the peer's own Python.
"""

from __future__ import annotations

import argparse
import json
import sys

from vllm.benchmarks.serve import add_cli_args, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    print('{"ready": true}', flush=True)
    for line in sys.stdin:
        found = main(parser.parse_args(json.loads(line)))
        print(json.dumps({name: value for name, value in found.items() if isinstance(value, int | float)}), flush=True)
