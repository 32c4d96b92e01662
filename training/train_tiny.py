"""Train `mneme-tiny` on a CPU and write it in the Hugging Face layout.

    python training/train_tiny.py [--quick] [--out DIR] [--threads N]

Phases: copying, coreference, everything mixed, everything mixed in long rows; each with a number of steps, so the
seed fixes the initial weights and what every step sees, whatever the machine. About 2 s a step on one thread of a
busy core. `--quick` proves in under 90 seconds that the script works; its model is of no use. A run that was stopped
goes on after its last whole phase when it is started again with the same `--out`.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from tiny_batches import Batch, RowSource, Stream, document_tokens
from tiny_checks import coreference_accuracy, document_nats
from tiny_corpus import Document, collect
from tiny_export import export, load
from tiny_host import cpu_name
from tiny_model import TinyConfig, TinyLlama
from tiny_tokenizer import CONTEXT_TOKENS, task_texts, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor

from mneme.kernels.native.library import cpu_features
from mneme.lab.quality.coreference import px_cases

SEED = 20
ROOT = Path(__file__).resolve().parent.parent
DEFAULT_OUT = ROOT / "replicas" / "mneme_tiny"
RECORD = "unfinished_run.json"
"""In the folder of the model files between two phases; a run that finds it goes on after that phase."""
QUICK_SCALE = 0.001
"""Of every phase's steps, with `--quick`: one or two. `Muon` multiplies in bfloat16 on any CPU; some take 7 s."""
WARM_STEPS = 40
"""Over which the learning rate rises, at the start and after an interruption."""
LOG_EVERY = 20
CHECK_EVERY = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of training: what each step sees, for how long, at which learning rate."""

    name: str
    num_steps: int
    """at most"""
    streams: tuple[Stream, ...]
    lr: tuple[float, float]
    """at the start and at the end; linear between"""
    difficulty: float = 0.0
    ramp_steps: int = 0
    """Steps with a loss under `ramp_below` that raise the difficulty to 1."""
    ramp_below: float = 0.0
    until: float = 0.0
    """Loss of the first stream, at full ramp, under which the phase is over early."""


PHASES = (
    Phase(
        name="copy",
        num_steps=600,
        lr=(3e-3, 3e-3),
        until=0.6,
        streams=(Stream(kind="repeat", num_tokens=4096, row_tokens=64),),
    ),
    Phase(
        name="coreference",
        num_steps=1600,
        lr=(3e-3, 3e-3),
        ramp_steps=120,
        ramp_below=0.5,
        until=0.2,
        streams=(
            Stream(kind="px", num_tokens=4096, row_tokens=640),
            Stream(kind="repeat", num_tokens=256, row_tokens=128, share=0.2),
        ),
    ),
    Phase(
        name="mixed",
        num_steps=1000,
        lr=(3e-3, 1.5e-3),
        difficulty=1.0,
        streams=(
            Stream(kind="lm", num_tokens=3072, row_tokens=512),
            Stream(kind="px", num_tokens=2560, row_tokens=640),
            Stream(kind="chat", num_tokens=1536, row_tokens=384, share=0.5),
        ),
    ),
    Phase(
        name="long",
        num_steps=500,
        lr=(1.5e-3, 5e-5),
        difficulty=1.0,
        streams=(
            Stream(kind="lm", num_tokens=CONTEXT_TOKENS, row_tokens=CONTEXT_TOKENS),
            Stream(kind="px", num_tokens=4096, row_tokens=640),
            Stream(kind="chat", num_tokens=1536, row_tokens=512, share=0.5),
        ),
    ),
)


@dataclass(slots=True)
class Progress:
    """What the model card tells about the run."""

    steps_by_phase: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    wall_s: float = 0.0


Check = Callable[[TinyLlama], dict[str, float]]
"""Measures a model between steps, and keeps a copy of it."""


def loss_of(model: TinyLlama, batch: Batch) -> Tensor:
    """Weighted mean cross entropy; only positions that count reach the vocabulary."""
    chosen = batch.weights[:, 1:] > 0
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled="avx512_bf16" in cpu_features()):
        logits = model.logits(model.hidden(batch.ids[:, :-1])[chosen])
    losses = F.cross_entropy(logits.float(), batch.ids[:, 1:][chosen], reduction="none")
    weights = batch.weights[:, 1:][chosen]
    return (losses * weights).sum() / weights.sum()


def optimizers_of(model: TinyLlama) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    ids = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in ids]
    return [
        torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


class Trainer:
    """Runs the phases one after another on one model."""

    def __init__(
        self, model: TinyLlama, rows: RowSource, scale: float, check: Check, out: Path, progress: Progress
    ) -> None:
        self.model, self.rows, self.scale, self.check = model, rows, scale, check
        self.out, self.progress = out, progress
        self.optimizers = optimizers_of(model)
        self.first_step = sum(progress.steps_by_phase.values())
        self.started = time.monotonic() - progress.wall_s

    def run(self, phases: tuple[Phase, ...]) -> None:
        for phase in phases:
            if phase.name in self.progress.steps_by_phase:
                continue
            self._run_phase(phase)
            print(json.dumps({"end of": phase.name} | self.check(self.model)), flush=True)
            self._record()

    def _record(self) -> None:
        """Leave what a later run needs to go on after this phase."""
        (self.out / RECORD).write_text(json.dumps(asdict(self.progress), indent=2) + "\n")

    def _run_phase(self, phase: Phase) -> None:
        difficulty = phase.difficulty
        num_steps = max(1, round(self.scale * phase.num_steps))
        for index in range(num_steps):
            loss = self._step(phase, index / num_steps, difficulty)
            if phase.ramp_steps and loss < phase.ramp_below:
                difficulty = min(1.0, difficulty + 1 / phase.ramp_steps)
            if loss < phase.until and (difficulty == 1.0 or not phase.ramp_steps):
                return

    def _step(self, phase: Phase, share: float, difficulty: float) -> float:
        step = sum(self.progress.steps_by_phase.values())
        self._set_lr(phase, share, step)
        losses = {stream.kind: self._backward(stream, difficulty) for stream in phase.streams}
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.progress.steps_by_phase[phase.name] = self.progress.steps_by_phase.get(phase.name, 0) + 1
        self.progress.wall_s = time.monotonic() - self.started
        self._log(phase, step, losses | {"difficulty": difficulty})
        return losses[phase.streams[0].kind]

    def _set_lr(self, phase: Phase, share: float, step: int) -> None:
        warm = min(1.0, (step - self.first_step + 1) / WARM_STEPS)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = warm * (phase.lr[0] + share * (phase.lr[1] - phase.lr[0]))

    def _backward(self, stream: Stream, difficulty: float) -> float:
        batch = self.rows.batch(stream, difficulty)
        loss = loss_of(self.model, batch)
        (loss * stream.share).backward()
        self.progress.num_tokens += batch.ids.numel()
        return loss.item()

    def _log(self, phase: Phase, step: int, figures: dict[str, float]) -> None:
        if step % LOG_EVERY:
            return
        line = {
            "phase": phase.name,
            "step": step,
            "s": round(self.progress.wall_s),
            "tokens": self.progress.num_tokens,
        } | {name: round(value, 3) for name, value in figures.items()}
        print(json.dumps(line), flush=True)
        if step % CHECK_EVERY == 0 and phase.name != "copy":
            print(json.dumps({"step": step} | self.check(self.model)), flush=True)


def checker(tokenizer: Tokenizer, held_out: list[str], folder: Path, seed: int) -> Check:
    """Small held-out measures; every call also exports the model to `folder`."""
    cases = list(px_cases(seed + 1, num_cases=40, num_chunks=12, num_sentences=4))

    def check(model: TinyLlama) -> dict[str, float]:
        export(model, tokenizer, folder)
        nats, num_tokens, _ = document_nats(model, tokenizer, held_out, window=512, max_tokens=4000)
        return {
            "px_full": coreference_accuracy(model, tokenizer, cases, reuse=False),
            "px_reuse": coreference_accuracy(model, tokenizer, cases, reuse=True),
            "held_out_nats": round(nats / num_tokens, 3),
        }

    return check


def train(documents: list[Document], out: Path, scale: float, seed: int) -> None:
    """Tokenizer, then all phases that `out` has not seen, then the finished folder and the run's record."""
    texts = [document.text for document in documents if not document.held_out]
    held_out = [document.text for document in documents if document.held_out]
    torch.manual_seed(seed)
    tokenizer = shipped_tokenizer(out) or train_tokenizer(texts + task_texts(seed))
    model, progress = TinyLlama(TinyConfig(vocab_size=tokenizer.get_vocab_size())), Progress()
    if (out / RECORD).exists():
        model, progress = load(out)[0], Progress(**json.loads((out / RECORD).read_text()))
    rows = RowSource(tokenizer, document_tokens(tokenizer, texts), seed + len(progress.steps_by_phase))
    trainer = Trainer(model, rows, scale, checker(tokenizer, held_out[::7], out, seed), out, progress)
    trainer.run(PHASES)
    (out / RECORD).unlink()
    record = asdict(progress) | run_facts(model, documents, seed)
    (out / "training_run.json").write_text(json.dumps(record, indent=2) + "\n")


def shipped_tokenizer(out: Path) -> Tokenizer | None:
    """The tokenizer that is already in the folder: once published, token ids do not change."""
    path = out / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.exists() else None


def run_facts(model: TinyLlama, documents: list[Document], seed: int) -> dict[str, object]:
    """Circumstances that the model card states."""
    chars_by_source: dict[str, int] = {}
    for document in documents:
        chars_by_source[document.source] = chars_by_source.get(document.source, 0) + len(document.text)
    return {
        "seed": seed,
        "threads": torch.get_num_threads(),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "num_parameters": sum(weight.numel() for weight in model.parameters()),
        "chars_by_source": chars_by_source,
        "num_held_out_documents": sum(document.held_out for document in documents),
        "num_documents": len(documents),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a run of under 90 s that proves the script")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the model files")
    parser.add_argument("--work", type=Path, default=ROOT / ".work" / "corpus", help="folder of the downloaded text")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    documents = collect(options.work, manual=not options.quick)
    train(documents[:200] if options.quick else documents, options.out, QUICK_SCALE if options.quick else 1.0, SEED)


if __name__ == "__main__":
    main()
