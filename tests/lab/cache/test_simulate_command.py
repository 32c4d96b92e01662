"""`mneme simulate cache` as a command: figures, tables, plots, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mneme.cluster.cli.main import main
from mneme.lab.cache.costs import Rates
from mneme.lab.cache.simulator import CacheSimulator
from mneme.lab.cache.traces import most_used_within
from tests.lab.trace_cases import BLOCK_TOKENS, lru_ratio, random_trace

SYNTHETIC = ["--trace", "synthetic:num_sessions=20", "--block-tokens", "64"]


def write_trace(folder: Path) -> Path:
    path = folder / "trace.jsonl"
    rows = [
        {
            "timestamp": int(asked.arrival_s * 1000),
            "input_length": asked.input_tokens,
            "output_length": asked.output_tokens,
            "hash_ids": asked.block_ids,
        }
        for asked in random_trace(1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def simulate(*arguments: str) -> int:
    return main(["simulate", "cache", *arguments])


@pytest.mark.parametrize("capacity", ["20", "inf"])
def test_one_run_is_one_line_of_json(tmp_path: Path, capacity: str, capsys: pytest.CaptureFixture[str]) -> None:
    trace = ["--trace", str(write_trace(tmp_path)), "--block-tokens", str(BLOCK_TOKENS)]
    assert simulate(*trace, "--policy", "lru", "--capacity-blocks", capacity, "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    size = 10**6 if capacity == "inf" else int(capacity)
    assert found["block_hit_ratio"] == pytest.approx(lru_ratio(random_trace(1), size), abs=1e-6)
    assert (found["policy"], found["num_requests"]) == ("lru", 300)
    assert found["capacity_blocks"] == [None if capacity == "inf" else size]


def test_tiers_of_bytes_move_blocks_and_cost_money(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates, prices = tmp_path / "rates.json", tmp_path / "prices.json"
    rates.write_text('{"kv_bytes_per_token": 250000000, "prefill_tokens_per_s": 10}')  # a block of four is 1 GB
    prices.write_text('{"device_per_hour": 3, "host_gb_per_hour": 0.1, "disk_gb_per_hour": 0.01}')
    trace = ["--trace", str(write_trace(tmp_path)), "--block-tokens", str(BLOCK_TOKENS)]
    sizes = ["--device-gb", "10", "--host-gb", "15.9", "--disk-gb", "25"]
    tables = ["--rates", str(rates), "--prices", str(prices)]
    assert simulate(*trace, *sizes, *tables, "--policy", "lru", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["capacity_blocks"] == [10, 15, 25]
    measured = Rates(kv_bytes_per_token=250_000_000, prefill_tokens_per_s=10)
    outcome = CacheSimulator(random_trace(1), [10, 15, 25], "lru", costs=measured.cost_model()).run()
    assert found["moved_gb"]["from_disk"] == outcome.tiers[2].num_read > 0 == found["prefetched_gb"]
    assert found["recomputed_blocks"] == outcome.num_recomputed
    assert found["moved_gb"]["to_host"] == outcome.tiers[1].num_written > 0
    ratios = [tier["hit_ratio"] for tier in found["tiers"].values()]
    assert sum(ratios) == pytest.approx(found["block_hit_ratio"], abs=1e-5)
    storage = 15.9 * 0.1 + 25 * 0.01
    assert found["hourly_cost"] == pytest.approx(found["busy_devices"] * 3 + storage, abs=1e-3)
    assert found["ttft_s"]["p50"] <= found["ttft_s"]["p90"] <= found["ttft_s"]["p99"]


def test_sizes_are_combined_and_the_queue_is_read_ahead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = tmp_path / "rates.json"
    rates.write_text('{"kv_bytes_per_token": 250000000, "disk_gb_per_s": 100}')
    trace = ["--trace", str(write_trace(tmp_path)), "--block-tokens", str(BLOCK_TOKENS), "--rates", str(rates)]
    sizes = ["--device-gb", "5", "--host-gb", "10,20", "--disk-gb", "0,30", "--policy", "returning"]
    assert simulate(*trace, *sizes, "--queue", "8", "--json") == 0
    plain = json.loads(capsys.readouterr().out)["runs"]
    assert [run["capacity_blocks"] for run in plain] == [[5, 10, 0], [5, 10, 30], [5, 20, 0], [5, 20, 30]]
    assert all(plain[0]["block_hit_ratio"] < run["block_hit_ratio"] for run in plain[1:])
    assert {run["hour_blocks"] for run in plain} == {most_used_within(random_trace(1), 3600.0)}
    sizes[sizes.index("0,30")] = "30"
    assert simulate(*trace, *sizes, "--queue", "8", "--prefetch", "--json") == 0
    ahead = json.loads(capsys.readouterr().out)["runs"]
    for before, after in zip(plain[1::2], ahead, strict=True):
        assert after["prefetched_gb"] > 0 == before["prefetched_gb"]
        assert after["tiers"]["disk"]["hit_ratio"] < before["tiers"]["disk"]["hit_ratio"]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ([*SYNTHETIC, "--capacity-blocks", "5", "--host-gb", "1"], "capacity-blocks: cannot be given beside"),
        ([*SYNTHETIC, "--capacity-blocks", "5", "--model", "nowhere"], "nowhere: no such model directory"),
        ([*SYNTHETIC, "--capacity-blocks", "5", "--kv-bytes-per-token", "-1"], "kv_bytes_per_token: must be"),
        ([*SYNTHETIC, "--capacity-blocks", "0"], "capacity-blocks: must be"),
        ([*SYNTHETIC, "--capacity-blocks", "5,"], "capacity-blocks: must be"),
        ([*SYNTHETIC, "--device-gb", "nan"], "device-gb: must be from 0"),
        ([*SYNTHETIC, "--host-gb", "1e-9"], "no tier holds a block"),
        ([*SYNTHETIC, "--capacity-blocks", "5", "--policy", "newest"], "policy: must be one of"),
        ([*SYNTHETIC, "--host-gb", "1000", "--queue", "4", "--prefetch"], "prefetch: needs a queue"),
        ([*SYNTHETIC, "--capacity-blocks", "5", "--queue", "-1"], "queue: must be from 0"),
        (["--trace", "synthetic", "--block-tokens", "0", "--capacity-blocks", "5"], "block-tokens: must be from 1"),
        (["--trace", "nothing.jsonl", "--capacity-blocks", "5"], "nothing.jsonl: cannot be read"),
        ([*SYNTHETIC, "--capacity-blocks", "5", "--rates", "nothing.json"], "nothing.json: no readable JSON"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*arguments) == 2
    output = capsys.readouterr()
    assert output.err.startswith("mneme simulate: ")
    assert rule in output.err
    assert output.out == ""
