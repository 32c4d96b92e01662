"""Replicas that follow the load: one to three, a step of requests, and a page with the plots. Needs Ray."""

from __future__ import annotations

import argparse
import subprocess
import sys

from server import Server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mneme-tiny")
    parser.add_argument("--peak", default="16", help="requests per second")
    parser.add_argument("--seconds", default="180", help="of load; a third of it is the step")
    parser.add_argument("--report", default="autoscale.html")
    args = parser.parse_args()
    settings = ("autoscale.upscale_delay_s=2", "autoscale.downscale_delay_s=20")
    with Server(args.model, *settings, options=("--replicas", "1..3")) as server:
        load = ["--peak", args.peak, "--seconds", args.seconds, "--report", args.report]
        command = [sys.executable, "-m", "mneme", "bench", "autoscale", "--url", server.url, *load]
        subprocess.run(command, check=True)
    print(f"plots: {args.report}")


if __name__ == "__main__":
    main()
