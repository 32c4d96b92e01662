"""An agent's 20 turns: each sends a tool's result alone, and only that is computed."""

from __future__ import annotations

import argparse
import time
from typing import Any

from server import Server

SYSTEM = "You look after the library by the sea. You may list shelves, read books and write notes. " * 6
RESULT = "The shelf has the books {first} to {last}. Two of them are lent, and one has a note in it."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mneme-tiny")
    parser.add_argument("--turns", type=int, default=20)
    args = parser.parse_args()
    prompt = found = 0
    with Server(args.model) as server:
        for turn in range(args.turns):
            result = {"role": "user", "content": RESULT.format(first=turn * 10, last=turn * 10 + 9)}
            body: dict[str, Any] = {
                "messages": [result] if turn else [{"role": "system", "content": SYSTEM}, result],
                "max_tokens": 16,
                "session": {"id": "agent", "append": turn > 0},
            }
            began_s = time.monotonic()
            usage = server.ask("/v1/chat/completions", body)["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            prompt, found = prompt + usage["prompt_tokens"], found + cached
            took_ms = (time.monotonic() - began_s) * 1e3
            print(f"turn {turn + 1:2}: {usage['prompt_tokens']:5} prompt tokens, {cached:5} found, {took_ms:6.0f} ms")
    print(f"{args.turns} turns: {prompt} prompt tokens, {found / prompt:.0%} of them found")


if __name__ == "__main__":
    main()
