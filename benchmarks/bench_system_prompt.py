"""Serving behind a shared system prompt: no sharing, sharing in memory only, and sharing in attention too.

    python benchmarks/bench_system_prompt.py [--quick] [--only PART] [--clock cpu] [--out FOLDER]

| part        | what is measured                                                                                    |
|-------------|-----------------------------------------------------------------------------------------------------|
| together    | b requests sharing 2,048 tokens, at once and staggered: time over one prefill, pages in use         |
| capacity    | sequences that run at once in a fixed pool, by the part of their tokens that is shared              |
| throughput  | RelayAttention Fig. 8: closed batch, three shapes over the system prompt's length; latencies        |
| few_shot    | RelayAttention Table 3: seconds for a batch of questions behind the same examples                   |
| interactive | RelayAttention Fig. 7: highest Poisson rate at a fixed normalized latency                           |
| batch       | ChunkAttention Fig. 4 in an engine: tokens/s while all decode, over the batch size                  |
| models      | RelayAttention Table 4: requests/s of other models                                                  |

Arms are the engine itself, the same kernels, pool and batch limit: `none` (`prefix_sharing` off: each request computes
and stores its own prompt), `PS` (computed and stored once, `share="never"`: attention reads it for each sequence) and
`relay` (as an engine is by default). The pool holds every batch unshared, so `none` never waits for pages: its growth
in running sequences is a part of its own. The engine is not told what is shared, but finds it at run time.

What bounds it: `none` by its prefills (2 x 26M flops for each token, and a system prompt for each request); `PS` by
attention's passes over the same keys, one for each sequence; `relay` by the projections of a decode step.

One thread, random weights, greedy, end-of-text ignored. Arms take turns, forwards and backwards; medians, and ratios of
one round's pairs. Seed, load average and machine are stated; the run, of about an hour, ends in one line of JSON with
all figures and the promised ones as `checks`.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: compiled kernels read it once
    from system_prompt import suite

    sys.exit(suite.run(__doc__))
