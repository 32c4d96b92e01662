"""The offline API on the embedded model."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mneme
from mneme import LLM, SamplingParams
from mneme.errors import CheckpointError, ConfigError, InvalidRequest, MnemeError, PinRefused
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.directory import model_directory
from mneme.replicas.request import GenerationRequest
from mneme.replicas.text.calls.answer_parser import whole_calls
from mneme.replicas.text.tool_calls import Dialect

pytestmark = pytest.mark.engine

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("mneme-tiny", dtype="float32")


@pytest.fixture
def card(tmp_path: Path) -> Path:
    """The embedded model, whose author would have it sampled in one way: the likeliest token, six of them."""
    directory = Path(shutil.copytree(model_directory("mneme-tiny"), tmp_path / "m"))
    says = {"do_sample": True, "temperature": 0.6, "top_k": 1, "top_p": 0.95, "max_new_tokens": 6}
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 3, **says}))
    return directory


def test_the_models_own_sampling_holds_where_params_leave_it_out(card: Path) -> None:
    question = [{"role": "user", "content": "Write something odd"}]

    def texts(llm: LLM, **given: Any) -> list[str]:
        params = [SamplingParams(**{"max_tokens": None, "ignore_eos": True, **given}, seed=s) for s in range(4)]
        return [answer.outputs[0].text for answer in llm.chat([question] * 4, params)]

    with LLM(str(card), dtype="float32") as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=1, top_p=0.95)
        assert len(set(texts(llm))) == 1
        assert len(set(texts(llm, top_k=0, temperature=1.5))) == 4
        answers = [llm.chat(question, SamplingParams(max_tokens=n, ignore_eos=True)) for n in (None, 9)]
        assert [len(answer.outputs[0].token_ids) for answer in answers] == [6, 9]
        prompt = llm.tokenizer.encode("a " * 2044)[:2044]
        (answer,) = llm.generate([prompt], SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(answer.outputs[0].token_ids) == llm.engine.max_context - 2044  # the model's wish is no demand
    with LLM(str(card), dtype="float32", config={"generation_config": "none"}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        assert len(set(texts(llm, max_tokens=12))) == 4


@pytest.mark.parametrize("wrap", [lambda form: form, lambda form: [form]], ids=["one", "list"])
def test_every_form_of_a_prompt_is_the_same_prompt(llm: LLM, wrap: Callable[[object], Any]) -> None:
    ids = llm.tokenizer.encode("The server", add_special_tokens=True)
    forms: list[object] = ["The server", {"prompt": "The server"}, ids, {"prompt_token_ids": ids}]
    outputs = [output for form in forms for output in llm.generate(wrap(form), GREEDY)]
    assert {output.prompt_token_ids for output in outputs} == {tuple(ids)}
    ((said, text, reason),) = {(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs}
    assert (len(said), text, reason) == (24, llm.tokenizer.decode(said, skip_special_tokens=True), "length")
    assert [output.prompt for output in outputs] == ["The server", "The server", None, None]
    assert len({output.request_id for output in outputs}) == len(forms)
    assert all(output.finished and 0 < output.metrics.ttft_s <= output.metrics.total_s for output in outputs)


def test_a_list_of_conversations_is_answered_by_a_list(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("Hello", "Who are you?")]
    alone = [llm.chat(messages, GREEDY) for messages in conversations]
    together = llm.chat(conversations, GREEDY, session_id=["first", None])
    assert [output.outputs for output in together] == [output.outputs for output in alone]
    assert together[1].prompt == llm.get_tokenizer().render_chat(conversations[1])


def test_the_example_of_the_docstring_says_something_sensible(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0))
    parts = [{"type": "text", "text": "Hello"}]
    assert llm.chat([{"role": "user", "content": parts}], SamplingParams(temperature=0)).outputs == answer.outputs
    assert answer.outputs[0].text == "Hello! How can I help you?"


def test_a_developer_speaks_as_the_system(llm: LLM) -> None:
    user = {"role": "user", "content": "Hello"}
    one, other = (llm.chat([{"role": role, "content": "Be brief."}, user], GREEDY) for role in ("developer", "system"))
    assert one.prompt == other.prompt


def test_who_takes_one_answer_for_a_list_is_told_how_to_get_one(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    alone = llm.chat(messages, GREEDY)
    for takes in (iter, list, lambda answer: answer[0]):
        with pytest.raises(TypeError, match=r"one conversation.*llm\.chat\(\[messages\]\)"):
            takes(alone)  # type: ignore[operator]
    assert [each.outputs for each in llm.chat([messages], GREEDY)] == [alone.outputs]


def test_what_is_closed_answers_no_more() -> None:
    with LLM(dtype="float32") as llm:
        assert llm.generate("The server", GREEDY)
    llm.close()
    with pytest.raises(MnemeError, match="closed"):
        llm.generate("The server", GREEDY)
    with pytest.raises(MnemeError, match="closed"):
        llm.warm("The server")


def test_the_package_lists_its_names() -> None:
    shown = {name for name in dir(mneme) if not name.startswith("_")}
    assert {name for name in shown if not inspect.ismodule(getattr(mneme, name))} == {
        "LLM",
        "Grammar",
        "SamplingParams",
    }
    assert mneme.__version__ == importlib.metadata.version("mneme")
    documented = {line.split()[0] for line in (SamplingParams.__doc__ or "").splitlines() if line.strip()}
    assert documented >= {field.name for field in dataclasses.fields(SamplingParams)}


def test_256_greedy_tokens_are_the_same_with_and_without_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts that share a long beginning; a penalty keeps the text from going round in circles."""
    params = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True, repetition_penalty=1.3)
    beginning = "The server keeps a table of its sessions in memory. A session that is idle is written to disk. " * 8
    prompts = [beginning + end for end in ("", "Now Alice. She likes tea.", "The default value of this parameter")]
    outputs = []
    for share in ("always", "never"):
        monkeypatch.setitem(Decoder.__init__.__kwdefaults__, "share", share)  # type: ignore[arg-type]
        outputs.append([out.outputs[0].token_ids for out in LLM(dtype="float32").generate(prompts, params)])
    assert outputs[0] == outputs[1]
    assert {len(ids) for ids in outputs[0]} == {256}
    assert min(len(set(ids)) for ids in outputs[0]) > 60
    assert len(set(outputs[0])) == 3


def test_choices_differ_by_seed_and_index_and_repeat_by_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=12, ignore_eos=True)
    one, again = (llm.generate(["Once"], params)[0].outputs for _ in range(2))
    assert one == again
    assert len({choice.token_ids for choice in one}) == 3
    other = llm.generate(["Once"], SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True))[0].outputs
    assert other != one


@pytest.mark.parametrize("includes", [False, True])
def test_a_stop_string_that_ends_inside_a_token_cuts_the_text_and_keeps_the_token(llm: LLM, includes: bool) -> None:
    """As in vLLM: text ends at the stop string, `token_ids` with the token that completed it."""
    free = llm.generate(["The server"], GREEDY)[0].outputs[0]
    texts = [llm.tokenizer.token_text(token_id) for token_id in free.token_ids]
    starts = [len("".join(texts[:index])) for index in range(len(texts))]
    # A token's text but for its last character, of the first for which that is new.
    stop = next(t[:-1] for t, start in zip(texts, starts, strict=True) if start and free.text.find(t[:-1]) == start)
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, stop=stop, include_stop_str_in_output=includes
    )
    stopped = llm.generate(["The server"], params)[0].outputs[0]
    end = free.text.index(stop) + len(stop) * includes
    assert (stopped.text, stopped.finish_reason) == (free.text[:end], "stop")
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    whole = llm.tokenizer.decode(stopped.token_ids, skip_special_tokens=True)
    assert whole.startswith(free.text[: free.text.index(stop)] + stop)
    assert len(whole) > end


def test_stop_ids_and_min_tokens(llm: LLM) -> None:
    free = llm.generate(["The server"], GREEDY)[0].outputs[0].token_ids
    stop_id = free[3]
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "stop_token_ids": [stop_id]}
    stopped = llm.generate(["The server"], SamplingParams(**params))[0].outputs[0]
    assert stopped.token_ids == free[: free.index(stop_id) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop_id)
    longer = llm.generate(["The server"], SamplingParams(**params, min_tokens=10))[0].outputs[0].token_ids
    assert stop_id not in longer[:10]


def test_logprobs_belong_to_the_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    choice = llm.generate(["The server"], params)[0].outputs[0]
    assert tuple(entry.token_id for entry in choice.logprobs) == choice.token_ids
    assert choice.cumulative_logprob == sum(entry.logprob for entry in choice.logprobs)
    for entry in choice.logprobs:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, pytest.approx(entry.logprob))


_START, _END = 2, 3  # of a message


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=16),
        SamplingParams(max_tokens=40, ignore_eos=True, logit_bias={_END: 8.0, _START: 6.0}),
        SamplingParams(max_tokens=40, ignore_eos=True, logit_bias={_END: 8.0}, skip_special_tokens=False),
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=2.0, seed=5, stop=("never said",)),
    ],
    ids=["ended", "special tokens", "shown", "stop string"],
)
def test_a_second_turn_hits_to_the_token(llm: LLM, params: SamplingParams) -> None:
    params = params if params.seed is not None else dataclasses.replace(params, temperature=0)
    messages: list[dict[str, str]] = [{"role": "user", "content": "Hello, who are you?"}]
    session = f"s{params}"
    first = llm.chat(messages, params, session_id=session)
    said = first.outputs[0]
    assert _END in said.token_ids[:-1] or not params.logit_bias
    messages += [{"role": "assistant", "content": said.text}, {"role": "user", "content": "And what can you do?"}]
    second = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8), session_id=session)
    known = first.metrics.prompt_tokens + len(said.token_ids)
    assert second.metrics.cached_tokens >= known - 1


def test_what_a_stop_string_cut_off_is_not_part_of_the_history(llm: LLM) -> None:
    messages: list[dict[str, str]] = [{"role": "user", "content": "Hello, who are you?"}]
    whole = llm.chat(messages, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)).outputs[0]
    tokens = [llm.tokenizer.token_text(token_id) for token_id in whole.token_ids]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, stop=("".join(tokens[6:8]),))
    first = llm.chat(messages, params, session_id="cut")
    assert first.outputs[0].text == "".join(tokens[:6])
    messages += [{"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "And then?"}]
    second = llm.chat(messages, SamplingParams(temperature=0, max_tokens=4), session_id="cut")
    again = llm.tokenizer.encode_rendered(llm.tokenizer.render_chat(messages))
    assert second.metrics.prompt_tokens == len(again)
    assert second.metrics.cached_tokens >= first.metrics.prompt_tokens + 6


def test_a_stop_string_is_seen_across_the_place_where_a_request_was_resumed(llm: LLM) -> None:
    drawn = {"temperature": 1.5, "seed": 8, "ignore_eos": True}
    free = llm.generate(["The server"], SamplingParams(max_tokens=24, **drawn))[0]
    emitted, text = free.outputs[0].token_ids[:10], free.outputs[0].text
    first = llm.tokenizer.decode(emitted, skip_special_tokens=True)
    stop = text[len(first) - 3 : len(first) + 3]  # three characters on either side
    assert text.count(stop) == 1
    resumed = GenerationRequest(
        request_id="resumed.0",
        prompt_token_ids=free.prompt_token_ids + emitted,
        sampling=SamplingParams(max_tokens=14, stop=(stop,), **drawn),
        output_offset=10,
    )
    llm.engine.submit(resumed)
    events = []
    while llm.engine.has_work:
        events += llm.engine.step()
    got = [token for event in events for token in event.token_ids]
    assert events[-1].finish_reason == "stop"
    assert 0 < len(got) < 14
    assert tuple(got) == free.outputs[0].token_ids[10 : 10 + len(got)]  # the draws go on where they were


def test_more_prompts_than_the_queue_holds() -> None:
    llm = LLM(config={"max_waiting": 4, "max_running": 2, "dtype": "float32"})
    outputs = llm.generate([f"Prompt {index}" for index in range(30)], SamplingParams(max_tokens=2, ignore_eos=True))
    assert [len(out.outputs[0].token_ids) for out in outputs] == [2] * 30


def test_a_conversation_in_one_batch_queues(llm: LLM) -> None:
    outputs = llm.generate(["One two", "One two three"], GREEDY, session_ids=["q", "q"])
    assert [len(out.outputs[0].token_ids) for out in outputs] == [24, 24]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"model": "/no/such/model"}, CheckpointError),
        ({"dtype": "int8"}, ConfigError),
        ({"device": "cuda:99"}, ConfigError),
        ({"config": {"page_sizes": 16}}, ConfigError),
    ],
)
def test_bad_arguments_are_one_clear_error(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        LLM(**arguments)
    assert "\n" not in str(caught.value)


def test_bad_requests_leave_nothing_behind(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        llm.generate(["fine", []], GREEDY)
    with pytest.raises(InvalidRequest, match="prompt"):
        llm.generate([[10**9]], GREEDY)
    with pytest.raises(InvalidRequest, match="session_ids"):
        llm.generate(["a", "b"], GREEDY, session_ids=["x"])
    with pytest.raises(InvalidRequest, match="session_ids"):
        llm.generate(["a", "b"], GREEDY, session_ids="xy")
    ids_of_two = {"prompt": "a", "prompt_token_ids": [5]}
    for prompts in ([5, "a"], [["a"]], [None], 5, b"a", [b"a"], {"text": "a"}, {"prompt_token_ids": "a"}, ids_of_two):
        with pytest.raises(InvalidRequest, match="prompts: must be a string, token ids,"):
            llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
    for params in ({"max_tokens": 3}, [{"max_tokens": 3}], [GREEDY, GREEDY]):
        with pytest.raises(InvalidRequest, match="sampling_params: must be SamplingParams"):
            llm.generate("a", params)  # type: ignore[arg-type]
    said: dict[str, object] = {"role": "user", "content": "a"}
    for messages, field in (("a", ""), (["a"], "[0]"), ([], ""), ([[]], "[0]"), ([[said], "a"], "[1]")):
        with pytest.raises(InvalidRequest, match=re.escape(f"messages{field}: a conversation is a list of messages")):
            llm.chat(messages)  # type: ignore[call-overload]
    bad: list[tuple[dict[str, object], str]] = [
        *(({**said, "content": content}, r"content\[0\]") for content in ([5], [{"type": "image_url"}])),
        ({**said, "content": 5}, "content"),
        *(({**said, "role": role}, "role") for role in (5, None, "narrator", ["user"])),
        ({"content": "a"}, "role"),
        ({"role": "user"}, "content"),
    ]
    for message, field in bad:
        with pytest.raises(InvalidRequest, match=rf"^messages\[1\]\.{field}: "):
            llm.chat([said, message])
        with pytest.raises(InvalidRequest, match=rf"^messages\[2\]\[1\]\.{field}: "):
            llm.chat([[said], [said], [said, message]])
    with pytest.raises(InvalidRequest, match="session_id: must be a list"):
        llm.chat([[{"role": "user", "content": "a"}]], session_id="s")
    with pytest.raises(InvalidRequest, match=r"must fit 2048 tokens together; this asks for .* and 24 more$"):
        llm.generate("a " * 3000, GREEDY)
    for stop in (5, {"a"}, ["a", 5]):
        with pytest.raises(InvalidRequest, match="stop: must be a string or a list of strings"):
            SamplingParams(stop=stop)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"documents\[1\]"):
        llm.chat([{"role": "user", "content": "a"}], documents=["d", ""])
    with pytest.raises(InvalidRequest, match=r"blend\.mode"):
        llm.chat([{"role": "user", "content": "a"}], documents=["d"], blend={"mode": "reuse"})
    with pytest.raises(InvalidRequest, match=r"prompt\[0\]"):
        llm.generate({"prompt": [{"type": "image", "text": "a"}]})
    assert llm.stats["pages"]["in_use"] == 0
    assert llm.stats["requests"] == {"running": 0, "waiting": 0, "suspended_total": 0}


def test_a_warm_prompt_is_cached_until_it_is_let_go(llm: LLM) -> None:
    system = [{"role": "system", "content": "You answer in one short sentence, and you never mention tea."}]
    configured = [{"role": "system", "content": "The server keeps a table of its sessions in memory."}]
    config = {"warm_prompts": [configured[0]["content"]], "num_pages": 64}
    cold = llm.chat([*system, {"role": "user", "content": "Who are you?"}], GREEDY)
    llm = LLM("mneme-tiny", dtype="float32", config=config)
    name = llm.warm(system)
    llm.generate([[3 + index, *[9] * 600] for index in range(6)], GREEDY)  # more than the pool holds
    for warmed in (configured, system):
        answer = llm.chat([*warmed, {"role": "user", "content": "Who are you?"}], GREEDY)
        text = llm.tokenizer.render_chat(warmed, add_generation_prompt=False)
        assert answer.metrics.cached_tokens >= len(llm.tokenizer.encode_rendered(text))
    assert answer.outputs == cold.outputs
    assert llm.unpin(name)
    assert not llm.unpin(name)
    with pytest.raises(InvalidRequest, match="part of the configuration"):
        llm.unpin("configured-0")
    for wrong in ([], [5, "a"], [{"role": "user", "content": "a"}, 5]):
        with pytest.raises(InvalidRequest):
            llm.warm(wrong)  # type: ignore[arg-type]
    with pytest.raises(PinRefused, match="would leave"):
        llm.warm([5] * 1500)


def test_a_document_that_was_sent_once_is_found_by_the_next_request(llm: LLM) -> None:
    """Wherever it stands there, and also where it was: it is reused but for the ratio of its tokens."""
    document = "The grey house on the hill has seven doors and a garden. " * 16
    asked = {"again": "Who lives there?", "with another before it": "How many doors?"}
    for name, question in asked.items():
        before = [f"{name}: the ship has three masts and a crew of twelve."]
        own = [f"{name}. {document}"]
        llm.chat([{"role": "user", "content": question}], GREEDY, documents=own)
        told = llm.chat(
            [{"role": "user", "content": f"{question} Say it."}],
            GREEDY,
            documents=own if name == "again" else before + own,
        ).metrics
        assert told.blend is not None
        size = told.blend.documents[-1].tokens
        assert told.cached_tokens >= 0.75 * size, name


def test_the_template_writes_tools(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    dialect = Dialect(llm.get_tokenizer())
    grammar = dialect.call_grammar({"weather": {}}, is_forced=True, is_one=True)
    asked = [{"role": "user", "content": "The weather?"}]
    output = llm.chat(asked, SamplingParams(max_tokens=60, seed=1, grammar=grammar), tools=[tool])
    assert '"name": "weather"' in (output.prompt or "")
    assert llm.chat(asked, GREEDY, chat_template_kwargs={"tools": [tool]}).prompt == output.prompt
    parser = dialect.parser(["weather"], is_forced=True)
    (call,) = whole_calls(parser.push(output.outputs[0].text, is_last=True).calls)
    assert (call.name, call.arguments) == ("weather", "{}")


def test_prompts_are_told_with_their_logprobs(llm: LLM) -> None:
    (told,) = llm.generate(["The server"], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, n=2))
    first, *items = told.prompt_logprobs
    assert first is None
    assert tuple(item.token_id for item in items) == told.prompt_token_ids[1:]
    assert {len(item.top) for item in items} == {2}
    assert llm.generate("The server", GREEDY)[0].prompt_logprobs is None


def test_only_allowed_tokens_are_drawn(llm: LLM) -> None:
    allowed = llm.tokenizer.encode("the server answers", add_special_tokens=False)
    for params in (
        SamplingParams(temperature=2.0, seed=1, max_tokens=24, allowed_token_ids=allowed),
        SamplingParams(temperature=0, max_tokens=24, min_tokens=24, allowed_token_ids=[*allowed, _END]),
        SamplingParams(temperature=0, max_tokens=24, allowed_token_ids=allowed, bad_words=["the", "server", "answers"]),
    ):
        [output] = llm.generate("The server", params)
        assert set(output.outputs[0].token_ids) <= set(allowed)
        assert len(output.outputs[0].token_ids) == 24  # none of them ends it


def test_bad_words_are_not_said(llm: LLM) -> None:
    [free] = llm.generate("The server", GREEDY)
    words = sorted(set(re.findall("[a-z]{4,}", free.outputs[0].text)), key=len)
    assert words
    bad = (words[0], words[-1])  # of few tokens, and of several
    [kept] = llm.generate("The server", dataclasses.replace(GREEDY, bad_words=bad))
    for word in bad:
        for written in (llm.tokenizer.encode_continuation(blank + word) for blank in ("", " ")):
            ids = list(kept.outputs[0].token_ids)
            assert all(ids[at : at + len(written)] != written for at in range(len(ids)))
    [same] = llm.generate("The server", dataclasses.replace(GREEDY, bad_words=["nowhere said"]))
    assert same.outputs == free.outputs


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_model_len": 0}, "max_context"),
        ({"gpu_memory_utilization": 0.9}, "kv_cache_bytes"),
        ({"num_pages": 64}, 'config={"num_pages"'),
        ({"trust_remote_code": True}, "no code of a model is run"),
        ({"modle": "x"}, "no argument modle$"),
    ],
)
def test_an_argument_of_vllms_is_refused_with_what_takes_its_place(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**given)


@pytest.mark.parametrize("is_cached", [True, False])
def test_arguments_of_vllms_are_honoured(is_cached: bool) -> None:
    given: dict[str, Any] = {"enable_prefix_caching": is_cached, "tensor_parallel_size": 1, "trust_remote_code": False}
    with LLM(config={"prefix_sharing": not is_cached}, max_model_len=512, max_num_seqs=2, **given) as llm:
        assert llm.engine.max_context == 512
        for _ in range(2):
            [answer] = llm.generate("The server " * 40, GREEDY)
    assert (answer.num_cached_tokens > 0) == is_cached
