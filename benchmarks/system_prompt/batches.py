"""Closed batches: throughput over the system prompt's length and the batch size, few-shot questions, other models."""

from __future__ import annotations

import itertools
from typing import Any

from harness import NOT_RUN, Check, PartResult, at_least
from random_models import SHAPES
from system_prompt.bench import NONE, PS, RELAY, ArmFigures, Bench, Shape, pool_pages

SYSTEM_LENGTHS = (64, 128, 256, 512, 1024, 2048)
USER_NEW = ((64, 128), (128, 256), (256, 512))  # RelayAttention appendix D
PROMISED = Shape(2048, 64, 128)
RELAY_OVER_PS, RELAY_OVER_NONE = 1.2, 2.0
FEW_SHOT_NEW = (4, 32)  # a choice and little more; what RelayAttention generates (appendix C)
_QUESTION_TOKENS = 64
# Llama's layout: the 31M model with a key head per query head, as Llama-2 has them, and a larger one.
OTHER_MODELS: dict[str, dict[str, Any]] = {
    "31M, 4 of 8 key heads": SHAPES["llama-31m"],
    "36M, 8 of 8 key heads": SHAPES["llama-31m"] | {"num_key_value_heads": 8},
    "98M, 12 of 12 key heads": SHAPES["llama-31m"] | {
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 12,
    },
}  # fmt: skip


def run_throughput(bench: Bench) -> PartResult:
    """RelayAttention Fig. 8: three shapes over the system prompt's length."""
    part = PartResult(
        name="throughput",
        title=f"closed batch of {bench.batch_limit} requests: output tokens/s, latency per token, first token",
    )
    for index, (user, new) in enumerate(bench.pick(full=USER_NEW, quick=USER_NEW[:1])):
        for system in bench.pick(full=SYSTEM_LENGTHS, quick=(64, 2048)):
            shape = Shape(system, user, new)
            rounds = bench.pick(full=max(1, 3 - index), quick=1)
            found = bench.closed_batches(bench.replica, shape, bench.batch_limit, rounds)
            row = shape._asdict() | found.columns(
                tokens_per_s="tok/s", normalized_ms="ms/tok", ttft_ms="TTFT ms", decode_per_s="decode tok/s"
            )
            part.rows.append(row | _speed_ups(found))
            if shape == PROMISED:
                part.checks += promised_checks(found)
    return part


def promised_checks(found: ArmFigures) -> list[Check]:
    """What the project promises of `PROMISED`."""
    return [
        at_least("relay_over_PS_2048_64_128", found.speed_up(RELAY, PS), RELAY_OVER_PS),
        at_least("relay_over_none_2048_64_128", found.speed_up(RELAY, NONE), RELAY_OVER_NONE),
    ]


def run_batch(bench: Bench) -> PartResult:
    """ChunkAttention Fig. 3 and 4 in an engine: tokens/s of the decode steps, against shared tokens and batch size."""
    part = PartResult(name="batch", title="tokens/s while all decode, 64 own prompt tokens, 128 new")
    for batch in bench.pick(full=(1, 2, 4, 8, 16, 32, 64), quick=(4,)):
        shape = Shape(2048, 64, 128)
        assert pool_pages(shape, batch) <= bench.num_pages, "the batch has to fit unshared"
        rounds = bench.pick(full=2, quick=1)
        found = bench.closed_batches(bench.replica, shape, batch, rounds, max_running=batch)
        row = {"batch": batch, "system": shape.system}
        part.rows.append(row | found.columns(decode_per_s="decode tok/s", tokens_per_s="tok/s") | _speed_ups(found))
    return part


def run_few_shot(bench: Bench) -> PartResult:
    """RelayAttention Table 3: a batch of questions behind the same examples."""
    num_questions = bench.pick(full=64, quick=16)
    part = PartResult(
        name="few_shot",
        title=f"seconds for {num_questions} questions of {_QUESTION_TOKENS} tokens; batch limit {bench.batch_limit}",
    )
    points = itertools.product(bench.pick(full=(512, 1024, 2048), quick=(1024,)), FEW_SHOT_NEW)
    for examples, new in points:
        shape = Shape(examples, _QUESTION_TOKENS, new)
        found = bench.closed_batches(bench.replica, shape, num_questions, bench.pick(full=3, quick=1))
        rates = found.columns(requests_per_s="s")
        seconds = {column: num_questions / rate for column, rate in rates.items() if rate is not None}
        part.rows.append({"examples": examples, "new": new} | seconds | _speed_ups(found))
    return part


def run_models(bench: Bench) -> PartResult:
    """RelayAttention Table 4: requests/s of other models."""
    part = PartResult(name="models", title=f"requests/s, (64, 128), closed batch of {bench.batch_limit}")
    shapes = [Shape(system, 64, 128) for system in (512, 1024)]
    for name, model in OTHER_MODELS.items():
        if bench.quick:
            part.rows.append({"model": name, "status": f"{NOT_RUN}: --quick"})
            continue
        replica = bench.make_replica(model, pool_pages(shapes[-1], bench.batch_limit))
        bench.warm_up(replica)
        for shape in shapes:
            found = bench.closed_batches(replica, shape, bench.batch_limit, rounds=2)
            row = {"model": name, "system": shape.system}
            part.rows.append(row | found.columns(requests_per_s="req/s") | _speed_ups(found))
    return part


def _speed_ups(found: ArmFigures) -> dict[str, float]:
    return {"relay/PS": found.speed_up(RELAY, PS), "relay/none": found.speed_up(RELAY, NONE)}
