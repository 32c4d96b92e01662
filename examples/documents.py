"""The same documents in another order: found, not computed, where the request leaves the order to the server."""

from __future__ import annotations

import argparse
from typing import Any

from server import Server

DOCUMENTS = [
    f"Chapter {number}. In the {place} of the library nobody spoke, and all the books were of {colour} cloth. " * 12
    for number, (place, colour) in enumerate((("cellar", "grey"), ("tower", "red"), ("garden", "green")), 1)
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mneme-tiny")
    args = parser.parse_args()
    with Server(args.model) as server:
        for indices, order in (((0, 1, 2), "any"), ((2, 0, 1), "any"), ((1, 2, 0), "given")):
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": "Which cloth?"}],
                "documents": [{"text": DOCUMENTS[index]} for index in indices],
                "blend": {"mode": "off", "order": order},  # exact: no KV behind other text than its own
                "max_tokens": 8,
            }
            usage = server.ask("/v1/chat/completions", body)["usage"]
            found = usage["prompt_tokens_details"]["cached_tokens"]
            print(f"{indices}, order {order}: {found} of {usage['prompt_tokens']} prompt tokens found", flush=True)


if __name__ == "__main__":
    main()
