"""The shipped tiny model: its files, tokenizer and template, coreference skill, and its training script."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaForCausalLM

from mneme.lab.quality.coreference import px_cases
from mneme.replicas.blend.gate import QualityReport, measured_on, read_gate, report_path
from mneme.replicas.engine.build import model_fingerprint
from mneme.replicas.model.directory import load_model_config
from tests.budget import examples

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ROOT / "training"
MODEL = ROOT / "replicas" / "mneme_tiny"
FILES = {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training_run.json",
}
MAX_BYTES = 16 * 10**6
texts = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return LlamaForCausalLM.from_pretrained(MODEL, local_files_only=True, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def training():
    """The measuring code of training/, which is a folder of scripts and no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TRAINING))
        import tiny_checks
        import tiny_export

        yield tiny_checks, tiny_export


def test_the_package_carries_the_model_in_less_than_16_mb():
    assert {path.name for path in MODEL.iterdir()} >= FILES
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < MAX_BYTES


def test_the_card_names_these_weights():
    sha256 = hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()
    assert sha256 in (MODEL / "README.md").read_text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quality_reports_of_these_weights_are_shipped(dtype):
    model = measured_on(model_fingerprint(MODEL, load_model_config(MODEL), dtype))
    assert read_gate((MODEL,), lambda: model).allowed
    assert {row.num_cases for row in QualityReport.read(report_path(MODEL, model)).rows} == {400}


@settings(max_examples=examples(200))
@given(texts)
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_bos_comes_once_from_the_tokenizer_or_from_the_template(tokenizer):
    chat = [{"role": "user", "content": "Hello"}]
    assert tokenizer.encode("Hello").count(tokenizer.bos_token_id) == 1
    ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.encode("Now Alice.", add_special_tokens=False).count(tokenizer.bos_token_id) == 0


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(texts, texts), min_size=2, max_size=4), st.booleans())
def test_the_template_is_prefix_stable(tokenizer, turns, with_system):
    messages = [{"role": "system", "content": " be brief\n"}] if with_system else []
    grown = ""
    for said, answered in turns:
        messages.append({"role": "user", "content": said})
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert prompt.startswith(grown)
        grown = prompt + answered + tokenizer.eos_token
        messages.append({"role": "assistant", "content": answered})


def test_template_and_training_text_agree(tokenizer, training):
    from tiny_tokenizer import render

    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": " u\n"}]
    by_jinja = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert by_jinja == render(chat, generate=True)


def test_transformers_computes_the_same_logits(model, tokenizer, training):
    own, _ = training[1].load(MODEL)
    ids = tokenizer("Now Alice. She likes tea.\nVACUUM reclaims storage.", return_tensors="pt").input_ids
    with torch.inference_mode():
        torch.testing.assert_close(own.logits(own.hidden(ids)), model(ids).logits, atol=1e-3, rtol=1e-4)


def test_chunks_are_tokenized_alike_alone_and_together(tokenizer):
    for case, _ in px_cases(5, num_cases=20, num_chunks=8, num_sentences=4, scene_share=0.2):
        alone = [token for chunk in case.chunks for token in tokenizer.encode(chunk, add_special_tokens=False)]
        assert alone == tokenizer.encode("".join(case.chunks), add_special_tokens=False)


def test_coreference_needs_attention_across_chunks(training):
    checks, export = training
    own, own_tokenizer = export.load(MODEL)
    cases = list(px_cases(77, num_cases=64, num_chunks=8, num_sentences=4))
    assert checks.coreference_accuracy(own, own_tokenizer, cases, reuse=False) >= 0.9
    assert checks.coreference_accuracy(own, own_tokenizer, cases, reuse=True) <= 0.85


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("Who are you?", "I am mneme-tiny, a small language model."),
        ("Count to 5.", "1 2 3 4 5"),
        ("Alice likes tea. Bob plays chess. What does Alice like?", "Alice likes tea."),
    ],
)
def test_it_answers_in_the_chat_format(model, tokenizer, said, answer):
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": said}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**prompt, max_new_tokens=40)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids) == answer + tokenizer.eos_token


@pytest.mark.slow
def test_quick_training_writes_a_model_that_loads(tmp_path):
    command = [
        sys.executable,
        "-W",
        "error",
        str(TRAINING / "train_tiny.py"),
        "--quick",
        "--out",
        str(tmp_path),
    ]
    subprocess.run(command, check=True, timeout=280)
    LlamaForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    record = json.loads((tmp_path / "training_run.json").read_text())
    assert set(record["steps_by_phase"]) == {"copy", "coreference", "mixed", "long"}
