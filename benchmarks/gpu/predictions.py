"""What each figure of the GPU targets is expected to be on one H200, written down before it was measured.

Arithmetic from 4.3 TB/s of copy bandwidth, 790 TFLOP/s of bf16 products, the kernels' SASS and host times measured on a
CPU. A figure far from its prediction, in either direction, is to be explained before anything is tuned. Where nothing
here says what a figure should be, the table says "none".
Units as in the table: ms per step or call, us, TB/s, GB/s, shares.
"""

from __future__ import annotations

# Llama-3-8B in bf16, decode: (requests, shared tokens) -> ms of the GPU, of the host, of the step. The GPU waits for
# the host, so the two add up; context 530 of each request's own, or 2,048 shared and 80 own.
DECODE_STEP = {
    (1, 0): (4.6, 0.8, 5.4),
    (32, 0): (5.4, 1.2, 6.6),
    (128, 0): (7.7, 2.8, 10.5),
    (256, 0): (14.1, 5.3, 19.4),
    (32, 2048): (5.0, 1.2, 6.2),
    (128, 2048): (6.0, 2.8, 8.8),
    (256, 2048): (10.7, 5.3, 16.0),
}
LINEARS_MS = {1: 4.0, 8: 4.0, 32: 4.1, 128: 4.6, 256: 7.5, 512: 11.5, 2048: 46.0}  # of one step, by its rows
COPY_TB_S, PRODUCTS_TFLOP_S, BUS_GB_S = 4.3, 790.0, 55.0
_OF_COPY = 0.85  # of the copy's bandwidth: what attention reads at
_INTERCEPT_US, _SEQUENCE_FIRST_US = 6.0, 3.5  # of one layer's call, with shared parts and without
_TOKEN_BYTES = 32 * 4096  # KV of Llama-3-8B
_MHA_BYTES = 4 * _TOKEN_BYTES  # of Llama-2-7B
_OF_WEIGHTS = 0.88  # of Llama-2-7B's over Llama-3-8B's, 13.2 and 15.0 GB
# (heads, batch, shared, private) -> speed-up over sequence-first on own copies, as a share of min(Eq. 10, roof).
OF_BOUND = {
    ("32/8x128", 32, 2048, 128): 0.59,
    ("32/8x128", 32, 16384, 128): 0.75,
    ("32/8x128", 128, 8192, 128): 0.53,
    ("32/8x128", 128, 8192, 768): 0.97,
    ("32/32x128", 32, 2048, 128): 0.84,
    ("32/32x128", 32, 8192, 128): 0.91,
}


def _attention_us(num_tokens: float, fixed_us: float) -> float:
    """A layer's decode over so many tokens' KV of 32 query and 8 KV heads of 128."""
    return fixed_us + num_tokens * 4096 / (_OF_COPY * COPY_TB_S * 1e6)


def _over_sequence_first(batch: int, apart: int, once: int) -> float:
    """Speed-up where a sequence has so many tokens, and all of them together have so many different ones."""
    return _attention_us(batch * apart, _SEQUENCE_FIRST_US) / _attention_us(once, _INTERCEPT_US)


PREDICTED: dict[str, float] = {
    "precompile": 45,
    "tests": 90,
    "copy": COPY_TB_S,
    "read-only sum": COPY_TB_S,
    "product of 8192": PRODUCTS_TFLOP_S,
    **{f"linears of a step, M {rows}": ms for rows, ms in LINEARS_MS.items()},
    **{f"eq10 {h} b{b} s{s} c{c}": share for (h, b, s, c), share in OF_BOUND.items()},
    "intercept shared": _INTERCEPT_US,
    "intercept sequence-first": _SEQUENCE_FIRST_US,
    **{f"bandwidth b{b} x {n}": share for b, n, share in ((32, 4096, 0.85), (128, 4096, 0.87), (32, 16384, 0.87))},
    **{f"bandwidth b{b} x {n}": 0.85 for b, n in ((64, 2048), (128, 1024))},  # the bytes of 32 x 4096
    "bandwidth b32 x 1024": 0.8,
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
    "ttft 128": 12.0,
    "ttft 1024": 32.0,
    "ttft 3840": 110.0,
    "ttft 64 on a cached 3840": 6.5,
    "bus, pinned to device": BUS_GB_S,
    "pin": 0.23,  # 0.2 to 0.3 s a GiB
    "host tier load, runs of 1": 10.0,
    "host tier load, runs of 64": 40.0,
    "host tier save, runs of 64": 40.0,
    "cache tier load of 4k": 20.0,
    "cache tier recompute of 4k": 110.0,
    "cache tier load over recompute": 20.0 / 110.0,
    "cache tier save of 4k, behind the answer": 4096 * _TOKEN_BYTES * (1 / BUS_GB_S + 1 / 10 + 1 / 15) / 1e6,  # in turn
    "decode b32, step": DECODE_STEP[32, 0][2],
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
    _attended = 96 if _s else 544  # of each request's own, by library calls: up to the end of a page
    _reads = {"SDPA": _b * (_s + _attended), ("FlashInfer cascade" if _s else "FlashInfer"): _s + _b * _attended}
    PREDICTED[f"decode {_kind} b{_b}, replayed"] = _gpu
    for _library, _num_tokens in _reads.items():
        _read_ms = _num_tokens * _TOKEN_BYTES / (COPY_TB_S * 1e9)
        PREDICTED[f"{_library} layers {_kind} b{_b}"] = LINEARS_MS[_b] + _read_ms
    # Less for the weights, more for the KV, and the same work for the host.
    _more_ms = (_s + _b * _own) * (_MHA_BYTES - _TOKEN_BYTES) / (_OF_COPY * COPY_TB_S * 1e9)
    PREDICTED[f"llama-2-7b {_kind.split()[0]} b{_b}, step"] = _step - LINEARS_MS[_b] * (1 - _OF_WEIGHTS) + _more_ms
