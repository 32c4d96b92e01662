"""The same documents in another order: found if the server may choose it, reused in place if a report allows that.

`mneme quality MODEL --task FILE` makes a model's report: what reuse behind other text does to its answers. mneme-tiny
comes with one; of a model without any each document is computed.
"""

from __future__ import annotations

import argparse
from typing import Any

from server import Server

DOCUMENTS = [
    f"Chapter {number}. In the {place} of the library nobody spoke, and all the books were of {colour} cloth. " * 12
    for number, (place, colour) in enumerate((("cellar", "grey"), ("tower", "red"), ("garden", "green")), 1)
]


def asked(indices: tuple[int, ...], blend: dict[str, Any]) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Which cloth?"}],
        "documents": [{"text": DOCUMENTS[index]} for index in indices],
        "blend": blend,
        "max_tokens": 8,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mneme-tiny")
    args = parser.parse_args()
    with Server(args.model) as server:
        for indices, order in (((0, 1, 2), "any"), ((2, 0, 1), "any"), ((1, 2, 0), "given")):
            exact = {"mode": "off", "order": order}  # no KV behind other text than its own
            usage = server.ask("/v1/chat/completions", asked(indices, exact))["usage"]
            found = usage["prompt_tokens_details"]["cached_tokens"]
            print(f"{indices}, order {order}: {found} of {usage['prompt_tokens']} prompt tokens found", flush=True)
        in_place = {"mode": "auto", "order": "given"}
        server.ask("/v1/chat/completions", asked((0, 1, 2), in_place))
        usage = server.ask("/v1/chat/completions", asked((2, 1, 0), in_place))["usage"]
        blend = usage["kv_details"]["blend"]
        print(f"in place, as the model's quality report allows: {blend.get('measured', False)}; {blend['why']}")
        for each in blend["documents"]:
            print(f"{each['id']}: {each['outcome']}, {each.get('why', '')}")


if __name__ == "__main__":
    main()
