"""What `mneme serve` says of its traffic."""

from __future__ import annotations

from typing import Any

from mneme.cluster.cli.serve import throughput_line


def service(prompt: int, cached: int, generated: int, *, running: int = 0) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "cached_tokens": cached, "generated_tokens": generated}
    return {**counts, "requests": {"running": running, "waiting": 0}, "kv_usage": 0.25}


def test_throughput_is_what_happened_between_two_looks() -> None:
    line = throughput_line(service(100, 0, 50), service(300, 50, 90, running=3), 10.0)
    assert line is not None
    assert line.startswith("prompt 20.0 tokens/s, generation 4.0 tokens/s, running 3, waiting 0, KV usage 25.0%")
    assert line.endswith("prefix hits 25.0%")


def test_nothing_is_said_of_nothing() -> None:
    assert throughput_line(service(100, 40, 50), service(100, 40, 50), 10.0) is None
    assert throughput_line(service(100, 40, 50), service(0, 0, 0), 10.0) is None  # the replicas were replaced
    assert throughput_line(service(100, 40, 50), service(100, 40, 50, running=1), 10.0) is not None
