"""Our attention against theory and against other ways to call it, in the form of the papers' tables and figures.

    python benchmarks/bench_attention.py [--device cpu|cuda] [--quick] [--only PART] [--threads 1] [--out FOLDER]

| part      | what is measured                                                                           |
|-----------|--------------------------------------------------------------------------------------------|
| headline  | batch 32, 2,048 shared + 128 private: `auto` against contiguous SDPA and gather + SDPA     |
| relay     | RelayAttention Fig. 1 and 5: latency, speed-up over sequence-first beside Eq. 10           |
| bandwidth | sequence-first decode: share of the measured copy bandwidth                                |
| documents | documents at other positions in every sequence; virtual queries, sequence-first, SDPA      |
| rotation  | random deltas against deltas of zero                                                       |
| regret    | `auto` against the better of `always` and `never`                                          |
| pensieve  | Pensieve Fig. 10: several rows over scattered pages, copy-out, rounds, contiguous          |

What bounds it: decode over private KV reads every key and value once (the copy bandwidth); a shared segment is read
once per batch, and from some batch size on its products bound it (the matrix rate). Both ceilings are measured in the
same run. Arms take turns, medians are reported, every arm is checked against float64 before it is timed, weights and
KV are random (the seed is stated). Each part has its share of the time; points that do not fit, or are too long for the
device, are "not run". The run ends in one line of JSON with all figures and the promised ones as `checks`.
"""

from __future__ import annotations

import argparse
import os
import sys

if __name__ == "__main__":
    # Before torch is imported: compiled kernels may bring an OpenMP of their own, which reads this once.
    threads = argparse.ArgumentParser(add_help=False)
    threads.add_argument("--threads", default="1")
    os.environ["OMP_NUM_THREADS"] = threads.parse_known_args()[0].threads
    from attention import suite

    sys.exit(suite.run(__doc__))
