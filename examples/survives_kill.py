"""A conversation goes on after `kill -9` of its server."""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

from server import Server

TEXT = "In a small library by the sea every book could remember its reader, and told the next one what it had heard. "


def say(server: Server, text: str, *, append: bool) -> None:
    began_s = time.monotonic()
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 16,
        "session": {"id": "library", "append": append},
    }
    usage = server.ask("/v1/chat/completions", body)["usage"]
    kv = usage["kv_details"]
    print(
        f"{time.monotonic() - began_s:6.2f} s  {usage['prompt_tokens']} prompt tokens: "
        f"{kv['device']} from the device, {kv['disk']} from the disk, {kv['recomputed']} computed",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mneme-tiny")
    parser.add_argument("--times", type=int, default=40, help="how often the text is repeated")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        disk = (f"cache.disk.folder={folder}", "cache.disk.capacity_bytes=4000000000", "cache.load=always")
        with Server(args.model, *disk) as server:
            say(server, TEXT * args.times, append=False)
            say(server, "And then?", append=True)
            time.sleep(3)  # chunks of KV are written behind the answer
            print("kill -9", flush=True)
            server.kill_and_restart()
            say(server, "And in the end?", append=True)


if __name__ == "__main__":
    main()
