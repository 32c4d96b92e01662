"""llama.cpp (through llama-cpp-python's low-level batch calls) on a workload of ours; a peer to measure.

    python3 -m venv .peers/llamacpp
    .peers/llamacpp/bin/pip install "llama-cpp-python==0.3.36" gguf   # builds llama.cpp, 5 to 12 minutes on two cores
    .peers/llamacpp/bin/python benchmarks/peers/llamacpp.py --workload W --json

Random float16 weights of the same shape, one thread, one context that holds every request as a sequence of its own:
the shared prefix is computed once and given to the others by `llama_memory_seq_cp`, decodes go in one batch. Cold: an
empty memory; warm: prompts are in memory but for their last token, which is what its server's prompt cache would give.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
from peers.report import parse_arguments, report
from workloads import MODEL_SHAPE, Workload, make_prompts

MAX_BATCH = 2048


def write_gguf(path: Path) -> None:
    """A random Llama of the workloads' shape."""
    import gguf

    shape, generator = MODEL_SHAPE, np.random.default_rng(0)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv_size = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(hidden // shape["num_attention_heads"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(shape["vocab_size"])

    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(name, (generator.standard_normal((rows, columns)) * 0.02).astype(np.float16))

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(hidden, np.float32))

    matrix("token_embd.weight", shape["vocab_size"], hidden)
    matrix("output.weight", shape["vocab_size"], hidden)
    norm("output_norm.weight")
    sizes = {"attn_q": (hidden, hidden), "attn_k": (kv_size, hidden), "attn_v": (kv_size, hidden),
             "attn_output": (hidden, hidden), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
             "ffn_down": (hidden, inner)}  # fmt: skip
    for layer in range(shape["num_hidden_layers"]):
        for name, (rows, columns) in sizes.items():
            matrix(f"blk.{layer}.{name}.weight", rows, columns)
        norm(f"blk.{layer}.attn_norm.weight")
        norm(f"blk.{layer}.ffn_norm.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Peer:
    """One context; each request is a sequence."""

    def __init__(self, path: Path, workload: Workload) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._workload = workload
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        per_request = workload.num_private + workload.num_new
        params.n_ctx = workload.num_shared + workload.num_requests * per_request + 256
        params.n_batch = params.n_ubatch = MAX_BATCH
        params.n_seq_max = workload.num_requests
        params.n_threads = params.n_threads_batch = 1
        params.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH, 0, workload.num_requests)

    def run(self, prompts: list[list[int]]) -> float:
        """Seconds from an empty memory to the last token."""
        self._api.llama_memory_clear(self._memory, True)
        started = time.perf_counter()
        self._prefill(prompts)
        self._generate(prompts)
        return time.perf_counter() - started

    def run_again(self, prompts: list[list[int]]) -> float:
        """The same prompts, their KV still in memory."""
        for sequence, prompt in enumerate(prompts):
            self._api.llama_memory_seq_rm(self._memory, sequence, len(prompt) - 1, -1)
        started = time.perf_counter()
        self._generate(prompts)
        return time.perf_counter() - started

    def _prefill(self, prompts: list[list[int]]) -> None:
        """All but each prompt's last token; the shared part once."""
        num_shared = self._workload.num_shared
        rows = [(token, position, 0) for position, token in enumerate(prompts[0][:num_shared])]
        self._decode_in_parts(rows)
        for sequence in range(1, len(prompts)):
            self._api.llama_memory_seq_cp(self._memory, 0, sequence, 0, num_shared)
        self._decode_in_parts(
            [(token, num_shared + offset, sequence)
             for sequence, prompt in enumerate(prompts) for offset, token in enumerate(prompt[num_shared:-1])]
        )  # fmt: skip

    def _generate(self, prompts: list[list[int]]) -> None:
        tokens = [prompt[-1] for prompt in prompts]
        vocab_size = MODEL_SHAPE["vocab_size"]
        for step in range(self._workload.num_new):
            rows = [(token, len(prompts[i]) - 1 + step, i) for i, token in enumerate(tokens)]
            self._decode(rows, logits=True)
            for index in range(len(rows)):
                logits = self._api.llama_get_logits_ith(self._context, index)
                tokens[index] = int(np.ctypeslib.as_array(logits, (vocab_size,)).argmax())

    def _decode_in_parts(self, rows: list[tuple[int, int, int]]) -> None:
        for start in range(0, len(rows), MAX_BATCH):
            self._decode(rows[start : start + MAX_BATCH], logits=False)

    def _decode(self, rows: list[tuple[int, int, int]], *, logits: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = logits
        status = self._api.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode returned {status}"


def main() -> None:
    arguments, workload = parse_arguments(__doc__)
    import llama_cpp

    with tempfile.TemporaryDirectory() as directory:
        write_gguf(Path(directory) / "model.gguf")
        peer = Peer(Path(directory) / "model.gguf", workload)
        peer.run(make_prompts(workload, 0))
        prompts = [make_prompts(workload, seed) for seed in range(1, arguments.runs + 1)]
        seconds = [(peer.run(batch), peer.run_again(batch)) for batch in prompts]
    report(arguments, workload, "llama.cpp", llama_cpp.__version__, [c for c, _ in seconds], [w for _, w in seconds])


if __name__ == "__main__":
    main()
