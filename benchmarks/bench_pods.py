"""What clients see while pods of the rendered chart are installed, changed, scaled, drained and lost.

    python benchmarks/bench_pods.py [--quick] [--only EVENT]... [--out DIR]

Pods are namespaces of this machine (`pods/namespaces.py`): a head with a Redis behind it and two workers, which have
the commands, environment, probe and preStop of `k8s/kustomize/cpu`. Two ingresses, `mneme-tiny` in float32, KV on a
folder that a pod finds again. Two clients stream 600 tokens of one greedy prompt, whose texts must all be alike;
two talk in sessions of 20 turns, each of which appends. Every request is a new connection to a door that the
service would choose.

*failed*: requests that ended with an error or a broken connection; of a killed ingress those are the streams that it
had open, which nobody can take over. *changed*: streams that ended well with another text. *found*: the share of
their history whose KV turns found, the least of all turns and the median. Needs root, `ip` and `redis-server`; bound
by the processor, as pods start Ray.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import PartResult, Run, at_least, at_most, options_of

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' reading of rendered manifests

from pods.load import Asked, Load
from pods.namespaces import Pods, until

_BEFORE_S, _AFTER_S = 5.0, 15.0  # of load around each event
_ENGINES = 2


def _small(args: dict[str, Any]) -> None:
    """What two cores can run: as the values of `cpu` say but for numbers."""
    args.pop("autoscale", None)
    args |= {"replicas": _ENGINES, "cpus_per_replica": 1}
    args["engine"] = {**args.get("engine", {}), "dtype": "float32", "num_threads": 1}
    args["cache"]["disk"]["capacity_bytes"] = 512 << 20
    args["ingress"] = {**args.get("ingress", {}), "replicas": 2, "cpus": 0.5}


class _Play:
    def __init__(self, run: Run, pods: Pods) -> None:
        self._run, self._pods = run, pods
        self.load = Load(pods.doors, 2, 2)
        self.rows: list[dict[str, Any]] = []
        self.text = ""

    @contextmanager
    def event(self, name: str) -> Iterator[None]:
        """Run an event under load, and put what its clients saw into the table."""
        time.sleep(_BEFORE_S)
        began = time.monotonic()
        yield
        took = time.monotonic() - began
        time.sleep(_AFTER_S)
        seen = [asked for asked in self.load.asked if asked.ended >= began]
        self.rows.append({"event": name, "seconds": round(took, 1), **self._figures(seen)})
        self._run.say(f"{self.rows[-1]}")
        for problem in sorted({asked.problem for asked in seen if asked.problem}):
            self._run.say(f"    {problem}")

    def _figures(self, seen: list[Asked]) -> dict[str, Any]:
        good = [asked for asked in seen if asked.problem is None]
        found = [asked.found for asked in good if asked.found is not None]
        streams = [asked for asked in good if asked.kind == "stream"]
        return {
            "requests": len(seen),
            "failed": len(seen) - len(good),
            "changed": sum(asked.text != self.text for asked in streams),
            "longest s": max((asked.ended - asked.began for asked in streams), default=None),
            "found, least": min(found, default=None),
            "found": statistics.median(found) if found else None,
        }

    def install(self) -> None:
        began = time.monotonic()
        for pod in self._pods.pods:
            pod.start()
        self._pods.deploy()
        until(lambda: len(self._pods.doors()) == 2 and len(self._pods.replicas()) == _ENGINES, "two ready doors")
        self.rows.append({"event": "install", "seconds": round(time.monotonic() - began, 1)})
        self._run.say(f"{self.rows[-1]}")
        self.load.start()
        until(lambda: any(asked.kind == "stream" and asked.problem is None for asked in self.load.asked), "a stream")
        self.rows.append({"event": "first answer, from the start", "seconds": round(time.monotonic() - began, 1)})
        self._run.say(f"{self.rows[-1]}")
        self.text = next(asked.text for asked in self.load.asked if asked.kind == "stream" and asked.problem is None)

    def change(self) -> None:
        """Change what engines read: all are replaced."""
        before = self._pods.replicas()
        self._pods.args["engine"]["max_running"] = 48
        self._pods.deploy()
        until(lambda: len(found := self._pods.replicas()) == _ENGINES and not found & before, "new engines")

    def scale(self, replicas: int) -> None:
        self._pods.args["replicas"] = replicas
        self._pods.deploy()
        until(lambda: len(self._pods.replicas()) == replicas, f"{replicas} engines")

    def kill_ingress(self) -> None:
        """Kill one of two ingresses; over when there are two again."""

        def ingresses() -> list[tuple[Any, str]]:
            return [(pod, pid) for pod in self._pods.workers for pid in pod.pids("ray::ServeReplica:mneme:ingress")]

        pod, pid = ingresses()[0]
        pod.inside("kill", "-9", pid)
        until(lambda: len(ingresses()) == 2 and (pod, pid) not in ingresses(), "another ingress")

    def drain(self) -> None:
        """Drain a worker by its preStop, start it anew as a pod that comes back to its node, and give it an engine.

        What ran there runs on the other now and stays; a pod is ready from its first replica on.
        """
        pod = self._pods.workers[0]
        pod.end()
        pod.start()
        self.scale(_ENGINES + 1)
        until(lambda: len(self._pods.doors()) == 2, "two ready doors")
        self.scale(_ENGINES)

    def lose_head(self) -> None:
        head = self._pods.pods[0]
        head.kill()
        time.sleep(10)
        head.start()
        self.scale(_ENGINES + 1)  # the new head's Serve does what it is told
        self.scale(_ENGINES)


def main() -> None:
    parser = options_of(__doc__, quick="scaled up and ingress killed alone", seed=False, out=True)
    parser.add_argument(
        "--only", action="append", metavar="EVENT", help="this event, behind the installation; install: none"
    )
    args = parser.parse_args()
    if os.geteuid():
        raise SystemExit("bench_pods: needs root, for namespaces")
    run = Run("pods", args)
    with Pods(_small) as pods:
        play = _Play(run, pods)
        events: dict[str, Callable[[], None]] = {
            "configuration changed": play.change,
            "scaled up": lambda: play.scale(_ENGINES + 1),
            "scaled down": lambda: play.scale(_ENGINES),
            "worker drained and back": play.drain,
            "head lost and back": play.lose_head,
            "ingress killed": play.kill_ingress,
        }
        try:
            play.install()
            for name, event in events.items():
                if name in (args.only or (("scaled up", "ingress killed") if args.quick else events)):
                    with play.event(name):
                        event()
        finally:
            play.load.stop()
    planned = [row for row in play.rows if row["event"] != "ingress killed" and "failed" in row]
    rows = [row for row in play.rows if "failed" in row]
    part = PartResult(name="pods", title="what clients saw", rows=play.rows)
    part.checks += [
        at_most(
            "failed_but_for_a_lost_ingress", sum(row["failed"] for row in planned) if planned else None, 0, "requests"
        ),
        at_most("changed", sum(row["changed"] for row in rows) if rows else None, 0, "streams"),
        at_least("found_of_history_median", min((row["found"] for row in rows), default=None), 0.9, "of it"),
    ]
    run.show(part)
    run.end(play.rows)


if __name__ == "__main__":
    main()
