"""How much SSD to buy: hit ratios of a trace by the size of the disk, from the simulator."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default="synthetic:num_sessions=300", help="or FILE: docs/operations.md, Traces")
    parser.add_argument(
        "--bytes-per-token", default="131072", help="of KV: `mneme doctor MODEL` (131072: Llama-3.1-8B)"
    )
    parser.add_argument("--host-gb", default="1", help="memory of a node for KV")
    parser.add_argument("--disk-gb", default="0,1,2,5,10,20,50,100", help="sizes to compare")
    args = parser.parse_args()
    options = [f"--host-gb={args.host_gb}", f"--disk-gb={args.disk_gb}", f"--kv-bytes-per-token={args.bytes_per_token}"]
    command = [sys.executable, "-m", "mneme", "simulate", "cache", f"--trace={args.trace}", *options, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    runs = json.loads(done.stdout.splitlines()[-1])["runs"]
    sizes = [float(size) for size in args.disk_gb.split(",")]
    found = {size: run["block_hit_ratio"] for size, run in zip(sizes, runs, strict=True)}
    for size, run in zip(sizes, runs, strict=True):
        first_s = run["ttft_s"]["mean"]
        print(
            f"{size:6g} GB of disk: {found[size]:4.0%} of the prompts' blocks found, mean first token {first_s:.3f} s"
        )
    enough = min(size for size in sizes if found[size] >= max(found.values()) - 0.01)
    print(f"{enough:g} GB are enough: more finds less than one block in a hundred more")


if __name__ == "__main__":
    main()
