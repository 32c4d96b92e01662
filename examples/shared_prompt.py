"""Many users behind one system prompt: it is computed once."""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

from server import Server

SYSTEM = "You answer questions about the library by the sea. It opens at nine, and its books remember their readers. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mneme-tiny")
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--times", type=int, default=20, help="how often the system prompt's text is repeated")
    args = parser.parse_args()
    with Server(args.model) as server:

        def ask(user: int) -> tuple[int, int]:
            messages = [
                {"role": "system", "content": SYSTEM * args.times},
                {"role": "user", "content": f"I am user {user}. When does it open?"},
            ]
            usage = server.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 8})["usage"]
            return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

        began_s = time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            counts = list(pool.map(ask, range(args.users)))
        prompt, cached = map(sum, zip(*counts, strict=True))
        print(
            f"{args.users} users in {time.monotonic() - began_s:.1f} s: "
            f"{prompt} prompt tokens, {cached / prompt:.0%} of them found"
        )


if __name__ == "__main__":
    main()
