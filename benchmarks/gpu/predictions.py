"""What each figure of the GPU targets is expected to be on one H200, written down before it was measured.

Arithmetic from 4.3 TB/s of copy bandwidth, 790 TFLOP/s of bf16 products, the kernels' SASS and host times measured on a
CPU. A figure far from its prediction, in either direction, is to be explained before anything is tuned.
Units as in the table: ms per step or call, us, TB/s, shares.
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
# (heads, batch, shared, private) -> speed-up over sequence-first on own copies, as a share of min(Eq. 10, roof).
OF_BOUND = {
    ("32/8x128", 32, 2048, 128): 0.59,
    ("32/8x128", 32, 16384, 128): 0.75,
    ("32/8x128", 128, 8192, 128): 0.53,
    ("32/8x128", 128, 8192, 768): 0.97,
    ("32/32x128", 32, 2048, 128): 0.84,
    ("32/32x128", 32, 8192, 128): 0.91,
}

PREDICTED: dict[str, float] = {
    "precompile": 45,
    "tests": 90,
    "copy": 4.3,
    "read-only sum": 4.3,
    **{f"linears of a step, M {m}": ms for m, ms in ((1, 4.0), (8, 4.0), (32, 4.1), (128, 4.6), (256, 7.5))},
    "linears of a step, M 512": 11.5,
    "linears of a step, M 2048": 46.0,
    **{f"eq10 {h} b{b} s{s} c{c}": share for (h, b, s, c), share in OF_BOUND.items()},
    "intercept shared": 6.0,
    "intercept sequence-first": 3.5,
    **{f"bandwidth b{b} x {n}": share for b, n, share in ((32, 4096, 0.85), (128, 4096, 0.87), (32, 16384, 0.87))},
    "bandwidth b32 x 1024": 0.8,
    "rotation documents": 1.035,
    "rotation shared": 1.0,
    "rotation pages": 1.8,
    "prefill 2048 rows of 2048 over cuDNN": 1.6,
    "prefill 8192 rows of 8192 over cuDNN": 1.8,
    "ttft 128": 12.0,
    "ttft 1024": 32.0,
    "ttft 3840": 110.0,
    "ttft 64 on a cached 3840": 6.5,
    "host tier load, runs of 1": 10.0,
    "host tier load, runs of 64": 40.0,
    "host tier save, runs of 64": 40.0,
    "cache tier load of 4k": 20.0,
    "cache tier recompute of 4k": 110.0,
}
for (_b, _s), (_gpu, _host, _step) in DECODE_STEP.items():
    _kind = f"shared {_s}" if _s else "private"
    PREDICTED |= {
        f"decode {_kind} b{_b}, step": _step,
        f"decode {_kind} b{_b}, GPU": _gpu,
        f"decode {_kind} b{_b}, host": _host,
    }
