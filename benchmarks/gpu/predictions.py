"""What each figure of the GPU targets is expected to be on one H200, written down before it was measured.

Arithmetic from 4.3 TB/s of copy bandwidth and 790 TFLOP/s of bf16 products, which H200s were seen to reach (the data
sheet says 4.8 and 989), the kernels' SASS and host times measured on a CPU. A figure far from its prediction, in either
direction, is to be explained before anything is tuned. Where nothing here says what a figure should be, the table says
"none".
Units as in the table: ms per step or call, us, TB/s, GB/s, shares.
"""

from __future__ import annotations

from itertools import product

# Llama-3-8B in bf16 on an H100, decode: (requests, shared tokens) -> ms of the GPU, of the host beside it, of the step.
# The GPU's are what a step's graph took alone on 26 November; a step is 0.1 to 0.15 ms more, for launches apart.
DECODE_STEP = {
    (1, 0): (6.35, 0.4, 6.45),
    (32, 0): (7.15, 0.8, 7.25),
    (128, 0): (10.2, 2.5, 10.35),
    (256, 0): (14.9, 4.5, 15.0),
    (32, 2048): (7.3, 0.8, 7.4),
    (128, 2048): (8.8, 2.5, 8.95),
    (256, 2048): (11.2, 4.5, 11.3),
}
LINEARS_MS = {1: 4.0, 8: 4.0, 32: 4.1, 128: 4.6, 256: 7.5, 512: 11.5, 2048: 46.0}  # of one step, by its rows
COPY_TB_S, PRODUCTS_TFLOP_S, BUS_GB_S = 4.3, 790.0, 55.0
DATA_SHEETS = {  # of the SXM cards, PCIe 5.0 x16
    "H200": {"copy": 4.8, "product of 8192": 989.0, "bus, pinned to device": 63.0},
    "H100": {"copy": 3.35, "product of 8192": 989.0, "bus, pinned to device": 63.0},
}
_OF_COPY, _OF_PRODUCTS = 0.85, 0.45  # what attention reads at and multiplies at
_INTERCEPT_US, _SEQUENCE_FIRST_US = 6.0, 3.5  # of one layer's call, with shared parts and without
_TOKEN_BYTES = 32 * 4096  # KV of Llama-3-8B
_MHA_BYTES = 4 * _TOKEN_BYTES  # of Llama-2-7B
_OF_WEIGHTS = 0.88  # of Llama-2-7B's over Llama-3-8B's, 13.2 and 15.0 GB


def _attention_us(num_tokens: float, fixed_us: float) -> float:
    """A layer's decode over so many tokens' KV of 32 query and 8 KV heads of 128."""
    return fixed_us + num_tokens * 4096 / (_OF_COPY * COPY_TB_S * 1e6)


def _over_sequence_first(batch: int, apart: int, once: int) -> float:
    """Speed-up where a sequence has so many tokens, and all of them together have so many different ones."""
    return _attention_us(batch * apart, _SEQUENCE_FIRST_US) / _attention_us(once, _INTERCEPT_US)


def _of_bound(num_kv_heads: int, batch: int, shared: int, private: int) -> float:
    """Speed-up over sequence-first on copies of its own, as a share of min(Eq. 10, roof); 32 query heads of 128."""
    token_bytes, per_us = 512 * num_kv_heads, COPY_TB_S * 1e6
    once, apart = (tokens * token_bytes for tokens in (shared + batch * private, batch * (shared + private)))
    products_us = 4 * 32 * 128 * batch * shared / (PRODUCTS_TFLOP_S * 1e6)
    apart_us = _SEQUENCE_FIRST_US + apart / (_OF_COPY * per_us)
    once_us = _INTERCEPT_US + max(once / (_OF_COPY * per_us), products_us / _OF_PRODUCTS)
    return apart_us / once_us / min(apart / once, apart / per_us / products_us)


PREDICTED: dict[str, float] = {
    "device memory": 150,
    "precompile": 45,
    # Rounding of rotated queries, of keys' weights and of results, each by 0.3 units in the last place.
    **{f"smoke {name}": 0.003 for name in ("private", "shared", "documents", "masks", "prefill", "window")},
    **{f"smoke {name}": 0.003 for name in ("one KV head per query head", "7 query heads per KV head")},
    **{f"smoke {name}": 0.003 for name in ("8 query heads, 64 dimensions", "pages at the end of a large pool")},
    **{f"smoke {name}": 0.003 for name in ("shared, pages of 64", "prefill, pages of 64")},
    "smoke float16": 0.0004,
    **{f"smoke int8 KV, {name}": 0.003 for name in ("private", "shared", "prefill", "float16")},  # weights in bfloat16
    "smoke draws": 0.0,
    "smoke float32": 1e-6,
    "smoke": 40,
    "tests": 90,
    "engine, 16 requests twice": 25,
    "engine, 8B, 16 requests twice": 20,
    "copy": COPY_TB_S,
    "read-only sum": COPY_TB_S,
    "product of 8192": PRODUCTS_TFLOP_S,
    **{f"linears of a step, M {rows}": ms for rows, ms in LINEARS_MS.items()},
    **{
        f"eq10 32/{kv}x128 b{b} s{s} c{c}": _of_bound(kv, b, s, c)
        for b, s, c in product((8, 32, 128), (2048, 8192, 16384), (128, 768))
        for kv in (8, 32)
    },
    "eq10 32/8x128 b1 s8192 c128": 1.0,  # nothing is shared
    **{f"tune {name}": 1.1 for name in ("decode b32 x 2048", "decode b1 x 16384", "prefill 2048 rows of 4096")},
    "tune decode b32, 8192 shared, 128 own": 1.1,
    # On an H100 the loop alone took 585 us for 2,048 rows of 8,192 visible keys where one launch took 797, and 51 of 66
    # for a prefix of 8,192 of 128 sequences; beside the private tiles it is max(51, 45) + 10 of 105.
    "wide prefill 2048 rows of 8192, over one launch": 1.3,
    "wide prefill 2048 rows of 32768, over one launch": 1.35,
    "wide decode b128, 8192 shared, 128 own, over one launch": 1.4,
    "wide decode b32, 2048 shared, 128 own, over one launch": 1.05,
    "intercept shared": _INTERCEPT_US,
    "intercept sequence-first": _SEQUENCE_FIRST_US,
    **{f"bandwidth b{b} x {n}": share for b, n, share in ((32, 4096, 0.85), (128, 4096, 0.87), (32, 16384, 0.87))},
    **{f"bandwidth b{b} x {n}": 0.85 for b, n in ((64, 2048), (128, 1024))},  # the bytes of 32 x 4096
    "bandwidth b32 x 1024": 0.8,
    # 0.516 of the bytes, and on sm_90 907 instructions for 32 keys where bfloat16 takes 371: of what a multiprocessor
    # issues while memory brings those keys, 0.78. With one request the fixed cost of a call counts.
    "int8 KV b128 x 1024": 1.7,
    "int8 KV b32 x 4096": 1.7,
    "int8 KV b1 x 16384": 1.5,
    "bandwidth b1 x 16384": _OF_COPY * (1 - _INTERCEPT_US / _attention_us(16384, _INTERCEPT_US)),
    "documents 4 of 4, sequence-first over ours": _over_sequence_first(32, 4 * 512 + 128, 4 * 512 + 32 * 128),
    **{
        f"documents {seen} of 32, sequence-first over ours": _over_sequence_first(
            32, seen * 512 + 128, 32 * (512 + 128)
        )
        for seen in (2, 4, 8, 16)
    },
    "rotation documents": 1.035,
    "rotation shared": 1.0,
    "rotation pages": 1.8,
    "prefill 2048 rows of 2048 over torch": 1.6,
    "prefill 8192 rows of 8192 over torch": 1.8,
    "prefill 2048 rows of 32768 over torch": 1.8,  # as many products, in 16 times fewer diagonal tiles
    "ttft 128": 12.0,
    "ttft 1024": 32.0,
    "ttft 3840": 110.0,
    "ttft 64 on a cached 3840": 6.5,
    "bus, pinned to device": BUS_GB_S,
    "pin": 0.1,  # 0.05 to touch pages, by several threads, and as much to pin them
    # Copies of 128 KiB take 6 us to launch; a scatter per layer is in their way.
    **{f"host tier load, runs of {length}": rate for length, rate in ((1, 10.0), (8, 40.0), (64, 40.0))},
    # Of a MiB each: a gather, its copies, and a thread that wakes up, 70 to 110 us.
    **{f"host tier save, runs of {length}": rate for length, rate in ((1, 9.0), (8, 14.0), (64, 14.0))},
    **{f"host tier load, runs of {length}, launching": 0.1 for length in (1, 8, 64)},
    "cache tier load of 4k": 20.0,
    "cache tier recompute of 4k": 110.0,
    "cache tier load over recompute": 20.0 / 110.0,
    "cache tier save of 4k, behind the answer": 4096 * _TOKEN_BYTES * (1 / BUS_GB_S + 1 / 10 + 1 / 15) / 1e6,  # in turn
    **{f"decode b32, {how}": DECODE_STEP[32, 0][2] for how in ("step", "cache tier off", "cache tier on")},
    # On an H100 attention takes 0.9 and 3.7 ms of the step over bfloat16, and 1.7 times less.
    "decode int8 KV b32, step": DECODE_STEP[32, 0][2] - 0.4,
    "decode int8 KV b128, step": DECODE_STEP[128, 0][2] - 1.5,
    # A prompt that joins makes its step one of more rows, with a new plan.
    "decode churn b32, step": 8.6,
    "decode churn b128, step": 11.9,
    "decode mixed b32, step": 8.0,
    "decode mixed b128, step": 11.8,
    "decode top-p 0.95 b32, step": DECODE_STEP[32, 0][2] + 2.0,
    "decode top-p 0.95 b128, step": DECODE_STEP[128, 0][2] + 2.8,
    # A load does not hold a step up; its bytes are written to the memory that the step reads.
    "decode b32 beside a load of 4k per step": DECODE_STEP[32, 0][2] + 4096 * _TOKEN_BYTES / (COPY_TB_S * 1e9),
}
for (_b, _s), (_gpu, _host, _step) in DECODE_STEP.items():
    _kind = f"shared {_s}" if _s else "private"
    PREDICTED |= {
        f"decode {_kind} b{_b}, step": _step,
        f"decode {_kind} b{_b}, GPU": _gpu,
        f"decode {_kind} b{_b}, host": _host,
    }
    if _b not in (32, 128):
        continue
    _own = 80 if _s else 530
    PREDICTED[f"decode {_kind} b{_b}, replayed"] = _gpu
    # Less for the weights, more for the KV, and the same work for the host.
    _more_ms = (_s + _b * _own) * (_MHA_BYTES - _TOKEN_BYTES) / (_OF_COPY * COPY_TB_S * 1e9)
    PREDICTED[f"llama-2-7b {_kind.split()[0]} b{_b}, step"] = _step - LINEARS_MS[_b] * (1 - _OF_WEIGHTS) + _more_ms

# `gpu-served` on one H100, Llama-3-8B in bf16: the engine's steps as measured there on 2026-11-26 and what HTTP adds,
# guessed from a CPU's figures: (tokens/s, median ms to the first token, between tokens, over the engine's step).
# Prefill runs at 37,000 tokens/s.
SERVED = {
    "1 in flight": (135.0, 30.0, 7.3, 0.3),
    "32 in flight": (2600.0, 150.0, 8.7, 0.5),
    "128 in flight": (4200.0, 600.0, 16.7, 3.5),
    "128 over 2048 shared": (7100.0, 150.0, 16.4, 3.5),
    "Poisson": (2900.0, 60.0, 12.0, 1.0),
    "64 x 4 turns": (1900.0, 80.0, 10.0, 1.0),
    "top-p 0.95 at 32": (2200.0, 150.0, 10.7, 0.5),
}
SERVED_AHEAD = {  # ms between tokens once the next step is launched before the last one's tokens are there
    "served 1 in flight, ITL": 6.8,
    "served 32 in flight, ITL": 7.8,
    "served 128 in flight, ITL": 11.5,
    "served 128 over 2048 shared, ITL": 10.5,
    "served top-p 0.95 at 32, ITL": 9.7,
}
for _load, _figures in SERVED.items():
    _names = (f"served {_load}, {what}" for what in ("tokens/s", "TTFT", "ITL", "over step"))
    PREDICTED |= dict(zip(_names, _figures, strict=True))
PREDICTED |= {
    "model written": 20.0,
    "served ready": 100.0,
    "served ready again": 60.0,
    "two replicas ready": 60.0,
    "kill -9 under 16 streams, failed": 0.0,
    "kill -9 under 16 streams, identical": 16.0,
    "kill -9 under 16 streams, pause": 300.0,
}
# `gpu-beside` on one H100, ms per token, ours one step ahead; vLLM's from the same layers by library calls there and
# what its host leaves uncovered. It reads a shared prefix for each sequence, from the L2 cache.
BESIDE = {
    "private b1": (6.45, 6.6),
    "private b32": (7.25, 7.6),
    "private b128": (10.4, 10.8),
    "private b256": (15.0, 16.0),
    "shared 2048 b32": (7.4, 8.5),
    "shared 2048 b128": (8.95, 12.0),
}
for _name, (_ours, _theirs) in BESIDE.items():
    PREDICTED |= {f"ours {_name}": _ours, f"vllm {_name}": _theirs, f"ours / vllm, {_name}": _ours / _theirs}
    PREDICTED[f"ours again {_name}"] = _ours
PREDICTED |= {"vllm FA3 error": 0.002, "vllm ready": 90.0, "ours ttft 3840": 103.0}
PREDICTED |= {"ours ttft 64 on a cached 3840": 8.0, "ours / vllm, ttft 64 on a cached 3840": 0.7}
