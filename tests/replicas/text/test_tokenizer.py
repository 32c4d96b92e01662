from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from mneme.errors import CheckpointError, InvalidRequest
from mneme.replicas.text.tokenizer import Tokenizer
from tests.replicas.tiny_tokenizer import BOS, CHATML, IM_END, IM_START, byte_level_backend, tiny_tokenizer

pytestmark = pytest.mark.engine

CHAT = [{"role": "user", "content": "the fox"}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    loaded = PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), bos_token="<|bos|>", eos_token="<|im_end|>")
    loaded.chat_template = CHATML
    loaded.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [IM_END, BOS]}))
    return path


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


def test_reads_a_checkpoint(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (BOS, (IM_END, BOS))
    assert tokenizer.vocab_size == byte_level_backend().get_vocab_size()


def test_special_tokens_are_added_as_hugging_face_adds_them(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.encode("the fox") == [BOS, *plain]  # as Hugging Face's
    assert tokenizer.decode([BOS, *plain], skip_special_tokens=True) == "the fox"
    assert tokenizer.decode([BOS, *plain], skip_special_tokens=False) == "<|bos|>the fox"


def test_rendered_text_is_encoded_with_its_special_tokens_and_no_other(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat(CHAT)
    assert text == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode_rendered(text)
    assert [token_id for token_id in ids if token_id < 3] == [IM_START, IM_END, IM_START]
    longer = tokenizer.render_chat([*CHAT, {"role": "assistant", "content": "jumps"}], add_generation_prompt=False)
    shared = tokenizer.encode_rendered(longer)
    assert shared[: len(tokenizer.encode_rendered(tokenizer.render_chat(CHAT, add_generation_prompt=False)))]


def test_rendering_equals_that_of_transformers(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    template = (
        "{{- bos_token }}\n{%- for m in messages %}\n"
        "    {%- if loop.first and m.role == 'system' %}"
        "[{{ m.content | trim }}]{% else %}\n{{ m | tojson }}{% endif %}\n"
        "{% generation %}x{% endgeneration %}"
        "{%- if loop.index > 2 %}{% break %}{% endif %}{%- endfor %}"
        "{% set ns = namespace(n=1) %}{% set ns.n = 2 %}"
        "{{ ns.n }}{{ '<' if add_generation_prompt }}{{ thinking is defined }}"
    )
    theirs = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    theirs.chat_template = template
    ours = tiny_tokenizer(template, template_variables=theirs.special_tokens_map)
    chat = [{"role": "system", "content": " 世 "}, *CHAT, {"role": "assistant", "content": '"<b>"'}, *CHAT]
    expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, thinking=False)
    assert ours.render_chat(chat, template_variables={"thinking": False}) == expected


@pytest.mark.parametrize(
    ("files", "default", "of_tools"),
    [
        ({"chat_template.jinja": "J", "additional_chat_templates/tool_use.jinja": "T"}, "J", "T"),
        ({"tokenizer_config.json": "C", "additional_chat_templates/tool_use.jinja": "T"}, "C", "T"),
        ({"tokenizer_config.json": [("default", "C"), ("tool_use", "U"), ("rag", "R")]}, "C", "U"),
        ({"tokenizer_config.json": [("default", "C"), ("tool_use", "U")], "chat_template.jinja": "J"}, "J", "J"),
        ({"chat_template.json": "P"}, "P", "P"),
        ({"chat_template.json": [("default", "P"), ("tool_use", "U")]}, "P", "U"),
        ({"chat_template.json": "P", "tokenizer_config.json": "C"}, "C", "C"),
        ({"tokenizer_config.json": [("rag", "R")]}, "", ""),
    ],
)
def test_templates_are_found_wherever_they_stand(
    model_dir: Path, tmp_path: Path, files: dict[str, object], default: str, of_tools: str
) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    for name, given in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(given, list):
            given = [{"name": named, "template": template} for named, template in given]
        if path.suffix == ".json":
            before = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps({**before, "chat_template": given}))
        else:
            path.write_text(str(given))
    with contextlib.closing(Tokenizer.load(tmp_path)) as tokenizer:
        assert (tokenizer.chat_template_source, tokenizer.tool_template_source) == (default, of_tools)
        if default:
            assert (
                tokenizer.render_chat(CHAT) == tokenizer.render_chat(CHAT, template_variables={"tools": []}) == default
            )
            assert tokenizer.render_chat(CHAT, template_variables={"tools": [{}]}) == of_tools


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000], ids=repr)
def test_damaged_files_are_one_clear_error(model_dir: Path, tmp_path: Path, name: str, content: bytes) -> None:
    for path in model_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_bytes(content[:200_000])
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        tokenizer.encode("a\ud800b", add_special_tokens=False)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ 10**(10**8) }}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__ }}",
        "{% if %}",
        "{{ missing.attribute.of }}",
    ],
)
def test_a_hostile_template_ends_in_time_and_harms_nobody(template: str) -> None:
    tokenizer = tiny_tokenizer(template, max_render_s=0.5)
    started = time.monotonic()
    with pytest.raises(InvalidRequest, match="chat template"):
        tokenizer.render_chat(CHAT)
    assert time.monotonic() - started < 60  # the start of a worker on a busy machine included
    tokenizer.close()


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "OwnTokenizer"])
def test_no_code_of_a_model_is_run(model_dir: Path, tmp_path: Path, tokenizer_class: str) -> None:
    """vLLM ran it with trust_remote_code=False (CVE-2026-27893)."""
    own = tmp_path / "own"
    shutil.copytree(model_dir, own)
    (own / "tokenization_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((own / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": tokenizer_class, "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (own / "tokenizer_config.json").write_text(json.dumps(config))
    with contextlib.suppress(CheckpointError):  # where nothing else says how to read it
        assert Tokenizer.load(own).encode("Hello") == Tokenizer.load(model_dir).encode("Hello")
    assert not (tmp_path / "ran").exists()


def test_a_template_that_never_ends_lets_a_server_start() -> None:
    tokenizer = tiny_tokenizer("{% for a in range(10**9) %}{% endfor %}", max_render_s=0.2)
    tokenizer.warm_up()  # whoever asks for a render is told
    tokenizer.close()


def test_other_conversations_go_on_while_one_never_ends() -> None:
    template = (
        "{% if messages[0].content == 'hang' %}{% for a in range(99999) %}"
        "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    tokenizer = tiny_tokenizer(template, max_render_s=2.0)
    assert tokenizer.render_chat([{"role": "user", "content": "a"}]) == "a"
    errors: list[Exception] = []

    def hang() -> None:
        try:
            tokenizer.render_chat([{"role": "user", "content": "hang"}])
        except InvalidRequest as error:
            errors.append(error)

    thread = threading.Thread(target=hang)
    thread.start()
    answers = 0
    while thread.is_alive():
        assert tokenizer.render_chat([{"role": "user", "content": "b"}]) == "b"
        answers += 1
    thread.join()
    assert answers
    assert "did not end" in str(errors[0])
    assert tokenizer.render_chat([{"role": "user", "content": "c"}]) == "c"
    tokenizer.close()


def test_messages_that_are_no_json_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="JSON"):
        tiny_tokenizer().render_chat([{"role": "user", "content": object()}])


def test_close_ends_every_worker() -> None:
    before, tokenizer = workers(), tiny_tokenizer()
    with ThreadPoolExecutor(2) as threads:
        while len(workers() - before) < 2:
            list(threads.map(tokenizer.render_chat, [CHAT] * 8))
    tokenizer.close()
    assert not workers() - before
    assert tokenizer.render_chat(CHAT).endswith("assistant\n")
    tokenizer.close()


def workers() -> set[str]:
    """The processes of this one that render templates."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"template_worker" in (path / "cmdline").read_bytes():
                found.add(path.name)
    return found


def test_a_model_without_a_template_refuses_chats() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        tiny_tokenizer(None).render_chat(CHAT)


def test_the_lower_bound_on_tokens_holds(tokenizer: Tokenizer) -> None:
    for text in ("", "the fox " * 500, "世界🙂" * 300, " " * 4000):
        assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.min_num_tokens("x" * 8_000_000) > 1024


def test_a_continuation_is_not_the_beginning_of_a_text() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"▁": 0, "a": 1, "b": 2, "</s>": 3}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(backend, eos_token_ids=(3,))
    assert tokenizer.encode_rendered("ab") == [0, 1, 2]
    assert tokenizer.encode_continuation("ab") == [1, 2]
    assert tokenizer.encode_continuation("</s>a") == [3, 1]
