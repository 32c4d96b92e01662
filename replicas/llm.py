"""The offline API: an engine in this process, no server, no Ray."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, Self, TypedDict, TypeGuard, TypeVar, overload

from mneme.cachetier.config import CacheConfig
from mneme.cachetier.names import PUBLIC_SALT, tenant_id
from mneme.cachetier.pin_book import PinName
from mneme.config import parse
from mneme.errors import ConfigError, InvalidRequest, MnemeError
from mneme.replicas.card import sampling_defaults
from mneme.replicas.choices import Choice, Delta, joined
from mneme.replicas.config import EngineConfig
from mneme.replicas.documents import BlendOptions, BlendUsage
from mneme.replicas.engine.build import build_engine
from mneme.replicas.engine.engine import BLOCKED_S
from mneme.replicas.engine.loop import EngineLoop
from mneme.replicas.engine.stats import engine_stats
from mneme.replicas.model.directory import model_directory
from mneme.replicas.request import GenerationRequest, Logprobs, SamplingParams, TokenEvent, session_key
from mneme.replicas.text.document_parts import EncodedPrompt, StandIns, encode_parts, prompt_parts
from mneme.replicas.text.prompts import ROLES, Appended, conversation_prefix, num_system_tokens
from mneme.replicas.text.tokenizer import Tokenizer
from mneme.replicas.truncation import Truncation, default_for, resolved
from mneme.replicas.vllm_options import FOREIGN, engine_keys

_TENANT = tenant_id("")  # the only one
_WRITE_S = 5.0  # at most, until what was said is in the logs of sessions


class TextPrompt(TypedDict):
    """vLLM's form of a prompt that is text, or parts of it: `{"type": "text" or "document", "text": ...}`."""

    prompt: str | Sequence[Mapping[str, Any]]


class TokensPrompt(TypedDict):
    """vLLM's form of a prompt that is token ids."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Conversation = Sequence[Mapping[str, Any]]  # messages: {"role": ..., "content": ...}
_PROMPT_RULE = 'must be a string, token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of such'
_CONVERSATION_RULE = 'a conversation is a list of messages, such as {"role": "user", "content": "Hello"}'
_T = TypeVar("_T")

_NOT_A_LIST = (
    "LLM.chat answers one conversation with one RequestOutput (its text: .outputs[0].text); "
    "for a list, as vLLM gives, pass a list of conversations: llm.chat([messages])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str
    token_ids: tuple[int, ...] = field(repr=False)
    finish_reason: str  # "stop" or "length"
    stop_reason: str | int | None = None  # of "stop", which string of `stop` or which of `stop_token_ids`
    logprobs: tuple[Logprobs, ...] | None = field(repr=False)

    @property
    def cumulative_logprob(self) -> float | None:
        """Return the sum of its tokens' log-probabilities, if they were asked for."""
        return None if self.logprobs is None else sum(each.logprob for each in self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Figures of one request; times begin when its prompt has been tokenized."""

    ttft_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int  # of the first choice
    truncated_tokens: int = 0  # dropped so that the others fit; not part of `prompt_tokens`
    blend: BlendUsage | None = None  # how its documents were used; None: it had none


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """All choices of one prompt."""

    request_id: str
    prompt: str | None  # the text, of a chat the rendered one; None for token ids
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics
    prompt_logprobs: tuple[Logprobs | None, ...] | None = field(default=None, repr=False)  # None first; None: not asked

    @property
    def num_cached_tokens(self) -> int:
        """Return how many tokens of the prompt the first choice found in the cache."""
        return self.metrics.cached_tokens

    @property
    def finished(self) -> bool:
        """Return whether every choice has ended: `LLM` returns when they have."""
        return all(choice.finish_reason for choice in self.outputs)

    def __iter__(self) -> NoReturn:
        raise TypeError(_NOT_A_LIST)

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(_NOT_A_LIST)


def _foreign_keys(others: Mapping[str, object]) -> dict[str, Any]:
    """Return what arguments of vLLM's set. Raises `ConfigError` for the first that cannot be, with what can."""
    keys: dict[str, Any] = {}
    for name, value in others.items():
        if name in {known.name for known in fields(EngineConfig)}:
            raise ConfigError(f'LLM: {name} is a field of config: config={{"{name}": ...}}')
        if name not in FOREIGN:
            raise ConfigError(f"LLM: there is no argument {name}")
        keys |= engine_keys(name, value, f"LLM: {name}", 'config={{"{}": ...}}')
    return keys


class LLM:
    """Answer in batches: `LLM("mneme-tiny").chat([{"role": "user", "content": "Hello"}]).outputs[0].text`.

    model   "mneme-tiny" (embedded), "smollm2", a model directory, a GGUF file, or a name on the Hugging Face hub
    device  "auto", "cpu", "cuda", "cuda:1"
    dtype   "float32", "bfloat16", "float16"; None: bfloat16 where the hardware has it (on a CPU for 16-bit checkpoints)
    config  `EngineConfig` or a mapping of its fields
    cache   `CacheConfig` or a mapping of its fields: KV kept in memory and files beyond the engine's pages; None: none

    `with LLM() as llm:` closes it at the end. Raises `CheckpointError` or `ConfigError`. Not thread-safe.
    """

    def __init__(
        self,
        model: str = "mneme-tiny",
        device: str = "auto",
        dtype: str | None = None,
        config: EngineConfig | Mapping[str, Any] | None = None,
        cache: CacheConfig | Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        base = config if isinstance(config, EngineConfig) else parse(EngineConfig, config or {}, "config")
        if cache is not None and not isinstance(cache, CacheConfig):
            cache = parse(CacheConfig, cache, "cache")
        given = {"device": device, "dtype": dtype or base.dtype, **_foreign_keys(others)}
        chosen = parse(EngineConfig, given)
        directory = model_directory(model)
        self.tokenizer = Tokenizer.load(directory)
        self._sampling_defaults = sampling_defaults(directory, base.generation_config)
        self._config = replace(base, **{name: getattr(chosen, name) for name in given})
        self.engine = build_engine(model, self._config, tokenizer=self.tokenizer, cache=cache)
        self._tier_answered = threading.Event()
        if self.engine.connector is not None:
            self.engine.connector.set_on_answer(self._tier_answered.set)
        self._default_truncation = default_for(base.truncation, self.engine.runner.immovable)
        self._default_blend = base.blend
        self._ids = itertools.count()
        self._random = random.Random()
        self._name = model
        self._is_closed = False

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        return f"LLM({self._name!r}, max_context={self.engine.max_context}{state})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stats(self) -> dict[str, Any]:
        """The engine's counters and gauges."""
        return engine_stats(self.engine)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: `encode`, `decode`, `render_chat`."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model says of sampling: it holds for what `SamplingParams` leave out."""
        return SamplingParams().with_defaults(self._sampling_defaults)

    def close(self) -> None:
        """Give back the host tier's memory and end what renders templates; garbage collection does so too."""
        if not self._is_closed:
            self._is_closed = True
            self.engine.close()
            self.tokenizer.close()

    def serve(self, host: str = "127.0.0.1", port: int = 8000, **settings: Any) -> None:
        """Serve OpenAI's API over this engine, as `mneme serve --local` does, until Ctrl-C; it is closed then.

        settings  further keys of the server's configuration, such as `served_name="m"` or `http={"api_keys": ["k"]}`

        Raises `ConfigError` if it cannot be served like that; it goes on as before then.
        """
        from mneme.cluster.cli.serve import serve_engine
        from mneme.cluster.config import from_mapping

        self._check_open()

        def take_engine() -> EngineLoop:
            self._is_closed = True
            return EngineLoop(self.engine)

        given = {"model": self._name, "host": host, "port": port, "engine": asdict(self._config), **settings}
        try:
            serve_engine(take_engine, from_mapping(given))
        finally:
            if self._is_closed:
                self.tokenizer.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        session_ids: Sequence[str | None] | None = None,
        truncation: Mapping[str, Any] | None = None,
        *,
        blend: Mapping[str, Any] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (text, token ids, or vLLM's mappings of them); one entry of the others per prompt.

        One `SamplingParams` is for all; its `max_tokens` is 16 where it says nothing. `truncation` (fields of
        `Truncation`) says what happens to what does not fit the window; sessions have `EngineConfig.truncation`
        without it. `blend` (fields of `BlendOptions`; for the others `EngineConfig.blend`) says how documents among a
        prompt's parts are used.

        `use_tqdm` shows progress on stderr; None: of several prompts in a terminal.

        Raises `InvalidRequest` or another `MnemeError`; nothing of the call runs on then.
        """
        listed = _listed(prompts)
        params = _one_per_prompt("sampling_params", sampling_params, SamplingParams, len(listed))
        sessions = _one_per_prompt("session_ids", session_ids, str, len(listed))
        jobs = [
            self._job(
                self._encoded(prompt),
                param or SamplingParams(),
                session,
                self._truncation(truncation, session),
                self._default_blend.updated({} if blend is None else blend),
            )
            for prompt, param, session in zip(listed, params, sessions, strict=True)
        ]
        return self._run(jobs, use_tqdm)

    @overload
    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        session_id: str | None = None,
        documents: Sequence[str | Mapping[str, Any]] | None = None,
        truncation: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        blend: Mapping[str, Any] | None = None,
        use_tqdm: bool | None = None,
    ) -> RequestOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        session_id: Sequence[str | None] | None = None,
        documents: Sequence[str | Mapping[str, Any]] | None = None,
        truncation: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        blend: Mapping[str, Any] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        session_id: str | Sequence[str | None] | None = None,
        documents: Sequence[str | Mapping[str, Any]] | None = None,
        truncation: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        blend: Mapping[str, Any] | None = None,
        use_tqdm: bool | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Answer a conversation through the model's chat template, or a list of them in one batch.

        Without `sampling_params` answers end where the model ends them. A list is answered by a list, with one entry of
        `session_id` for each; otherwise as `generate`. `documents` (texts, or mappings with a text and perhaps a title
        and an id) stand where the template puts them, else before the last user's text; messages may have documents
        among the parts of their content, too. `tools` (as OpenAI's) are written by the template, which sees
        `chat_template_kwargs` as well; answers are text as it was drawn, in which `Dialect(llm.get_tokenizer()).parser`
        finds calls.
        """
        conversations, is_one = _conversations(messages, documents or ())
        params = _one_per_prompt("sampling_params", sampling_params, SamplingParams, len(conversations))
        sessions = _one_per_prompt("session_id", [session_id] if is_one else session_id, str, len(conversations))
        jobs = [
            self._chat_job(
                *conversation,
                param or SamplingParams(max_tokens=None),
                session,
                self._truncation(truncation, session),
                self._default_blend.updated({} if blend is None else blend),
                {**(chat_template_kwargs or {}), **({"tools": list(tools)} if tools else {})},
            )
            for conversation, param, session in zip(conversations, params, sessions, strict=True)
        ]
        outputs = self._run(jobs, use_tqdm)
        return outputs[0] if is_one else outputs

    def warm(self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]], ttl_s: float | None = None) -> str:
        """Compute a prompt (text, token ids, or the first messages of a chat) and keep its KV; returns the pin's name.

        Raises `PinRefused` or another `MnemeError`.
        """
        self._check_open()
        name = PinName(_TENANT, f"llm-{next(self._ids)}")
        self.engine.pins.warm(name, "", tuple(self._prefix_ids(prompt)), ttl_s=ttl_s)
        while self.engine.has_work:
            self._step()
        described = self.engine.pins.describe(name)
        error = MnemeError("the prompt was let go before it was computed") if described is None else described.error
        if error is not None:
            self.engine.pins.unpin(name)
            raise error
        return name.pin_id

    def unpin(self, name: str) -> bool:
        """Unpin what `warm` keeps; returns whether it was kept."""
        pins = self.engine.pins
        return pins.unpin(PinName(_TENANT, name)) or pins.unpin(PinName(tenant_id(PUBLIC_SALT), name))

    def _prefix_ids(self, prompt: str | Sequence[int] | Conversation) -> Sequence[int]:
        if not isinstance(prompt, str):
            messages = [each for each in prompt if isinstance(each, Mapping)]
            if messages and len(messages) == len(prompt):
                return conversation_prefix(self.tokenizer.render_chat, self.tokenizer.encode_rendered, messages)
        return self._encoded(prompt).token_ids

    def _encoded(self, prompt: object) -> EncodedPrompt:
        form = prompt if isinstance(prompt, Mapping) and len(prompt) == 1 else {}
        given, ids = form.get("prompt", prompt), form.get("prompt_token_ids", prompt)
        if isinstance(given, str) or ("prompt" in form and isinstance(given, list) and not _are_ids(given)):
            return encode_parts(self.tokenizer, prompt_parts(given, ()), add_special_tokens=True)
        if _are_ids(ids):
            return EncodedPrompt(tuple(ids))
        raise InvalidRequest("prompts", prompt, _PROMPT_RULE)

    def _truncation(self, given: Mapping[str, Any] | None, session_id: str | None) -> Truncation | None:
        return resolved(given, self._default_truncation, has_session=session_id is not None)

    def _chat_job(
        self,
        messages: Conversation,
        stand_ins: StandIns,
        params: SamplingParams,
        session_id: str | None,
        truncation: Truncation | None,
        blend: BlendOptions,
        variables: Mapping[str, Any],
    ) -> _Job:
        render = partial(self.tokenizer.render_chat, template_variables={**variables, **stand_ins.variables})
        text = stand_ins.placed(lambda some: Appended(render(some), 0), messages).text
        prompt = encode_parts(self.tokenizer, stand_ins.cut(text))
        if truncation is not None and truncation.keep == "system":
            encode = partial(stand_ins.encode_prefix, self.tokenizer)
            prompt = prompt._replace(num_system=num_system_tokens(render, encode, messages, prompt.token_ids))
        return self._job(prompt, params, session_id, truncation, blend)

    def _job(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams,
        session_id: str | None,
        truncation: Truncation | None,
        blend: BlendOptions,
    ) -> _Job:
        """Make the choices of a prompt, each with its request."""
        params = params.with_defaults(self._sampling_defaults)
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        name = f"llm-{next(self._ids)}"
        choices = [
            Choice(
                index=index,
                tokenizer=self.tokenizer,
                request=GenerationRequest(
                    request_id=f"{name}.{index}",
                    prompt_token_ids=prompt.token_ids,
                    sampling=replace(params, seed=seed),
                    choice_index=index,
                    num_choices=params.n,
                    session_id=session_id,
                    prompt_text=prompt.text,
                    truncation=truncation,
                    num_system=prompt.num_system,
                    documents=prompt.documents,
                    blend=blend,
                ),
            )
            for index in range(params.n)
        ]
        return _Job(choices, time.perf_counter())

    def _check_open(self) -> None:
        if self._is_closed:
            raise MnemeError("this LLM is closed")

    def _run(self, jobs: list[_Job], show_progress: bool | None) -> list[RequestOutput]:
        self._check_open()
        self.engine.pins.expire()
        choice_by_id = {choice.request.request_id: choice for job in jobs for choice in job.choices}
        unsent = deque(choice.request for choice in choice_by_id.values())
        durable = self.engine.durable
        if durable is not None:
            sessions = self.engine.sessions
            sessions.restore_all(durable.recall(map(session_key, unsent), sessions.version_of))
        try:
            with _progress_of(len(choice_by_id), show_progress) as show:
                while unsent or self.engine.has_work:
                    while unsent and self.engine.limits.has_room(unsent[0]):
                        self.engine.submit(unsent.popleft())
                    if self.engine.is_blocked:
                        self._tier_answered.wait(BLOCKED_S)
                    self._tier_answered.clear()
                    for event in self._step():
                        if event.request_id in choice_by_id:
                            _hear(choice_by_id[event.request_id], event)
                            show(event)
        finally:  # an error, or Ctrl-C: nothing of this call may run on
            for request_id in choice_by_id:
                self.engine.abort(request_id)
            self.engine.pop_events()
            if durable is not None:
                durable.writer.flush(_WRITE_S)
        return [job.output() for job in jobs]

    def _step(self) -> list[TokenEvent]:
        try:
            return self.engine.step()
        except BaseException:  # Ctrl-C too: what the step was to compute is not there
            self.engine.fail_all("the step was not completed")
            raise


def _are_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes | bytearray):
        return False
    return all(type(token_id) is int for token_id in prompt)


def _listed(prompts: object) -> list[object]:
    """Make a list of prompts; one alone is a list of one."""
    if isinstance(prompts, str | Mapping) or (prompts and _are_ids(prompts)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise InvalidRequest("prompts", prompts, _PROMPT_RULE)
    return list(prompts)


def _conversations(messages: object, documents: Sequence[object]) -> tuple[list[tuple[Conversation, StandIns]], bool]:
    """Return the conversations as templates expect them, with their documents, and whether it is one alone."""
    if isinstance(documents, str | Mapping):
        raise InvalidRequest("documents", documents, "must be a list of texts or mappings")
    listed = list(messages) if isinstance(messages, Sequence) and not isinstance(messages, str) else []
    if any(isinstance(each, Mapping) for each in listed):
        return [_checked(listed, "messages", StandIns(documents))], True
    if not listed:
        raise InvalidRequest("messages", messages, _CONVERSATION_RULE)
    return [_checked(each, f"messages[{i}]", StandIns(documents)) for i, each in enumerate(listed)], False


def _checked(messages: object, where: str, stand_ins: StandIns) -> tuple[Conversation, StandIns]:
    """Check one conversation; an `InvalidRequest` names the message by `where` and its index."""
    if not (isinstance(messages, Sequence) and messages and all(isinstance(each, Mapping) for each in messages)):
        raise InvalidRequest(where, messages, _CONVERSATION_RULE)
    return [_checked_message(message, where, i, stand_ins) for i, message in enumerate(messages)], stand_ins


def _checked_message(message: Mapping[str, Any], where: str, index: int, stand_ins: StandIns) -> Mapping[str, Any]:
    """Join content that is given in parts, as OpenAI's clients do; templates expect one text."""
    where = f"{where}[{index}]"
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role", role, f"each message says who speaks: one of {', '.join(ROLES)}")
    if content is None and not message.get("tool_calls"):
        raise InvalidRequest(f"{where}.content", None, "each message has the text that was said")
    if role == "developer":
        message = {**message, "role": "system"}  # its older name, which templates know
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content", content, "must be text, or a list of parts")
    return {**message, "content": stand_ins.content(content, f"{where}.content", group=index)}


def _one_per_prompt(name: str, value: object, kind: type[_T], num_prompts: int) -> list[_T | None]:
    """List a value for each prompt, None for those without one; one `SamplingParams` is for all."""
    if value is None or isinstance(value, SamplingParams):
        value = [value] * num_prompts
    if not isinstance(value, list | tuple) or len(value) != num_prompts:
        rule = f"must be a list with one entry for each of the {num_prompts} prompts"
        raise InvalidRequest(name, value, rule if kind is str else f"must be SamplingParams, or {rule[8:]}")
    for each in value:
        if each is not None and not isinstance(each, kind):
            raise InvalidRequest(name, each, f"must be {kind.__name__}")
    return list(value)


@contextmanager
def _progress_of(num_choices: int, shown: bool | None) -> Iterator[Callable[[TokenEvent], None]]:
    """Show on stderr how far choices are; the body tells it of their events.

    shown  None: for several, where stderr is a terminal
    """
    if not (sys.stderr.isatty() and num_choices > 1 if shown is None else shown):
        yield lambda event: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    rate = TextColumn("{task.fields[num_tokens]} tokens, {task.fields[tokens_per_s]:.0f}/s")
    columns = (TextColumn("answered"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), rate)
    num_tokens = 0
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("", total=num_choices, num_tokens=0, tokens_per_s=0.0)

        def take(event: TokenEvent) -> None:
            nonlocal num_tokens
            num_tokens += len(event.token_ids)
            per_s = num_tokens / max(bars.tasks[0].elapsed or 0.0, 1e-3)
            is_end = event.finish_reason is not None
            bars.update(task, advance=1 if is_end else 0, num_tokens=num_tokens, tokens_per_s=per_s)

        yield take


class _Job(NamedTuple):
    """The choices of one prompt, which had been tokenized at `started_s`."""

    choices: list[Choice]
    started_s: float

    def output(self) -> RequestOutput:
        said = [joined(list(choice.pop_deltas())) for choice in self.choices]
        first, usage = self.choices[0].request, self.choices[0].usage
        if usage.blend is not None:
            first = first.in_order(usage.blend.order)
        last_s = max(choice.last_s for choice in self.choices)
        first_s = min(last_s if choice.first_s is None else choice.first_s for choice in self.choices)
        of_prompt = said[0].of_prompt
        return RequestOutput(
            request_id=first.request_id.partition(".")[0],
            prompt=first.prompt_text,
            prompt_token_ids=first.prompt_token_ids,
            outputs=tuple(map(_completion, self.choices, said)),
            metrics=RequestMetrics(
                ttft_s=first_s - self.started_s,
                total_s=last_s - self.started_s,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                truncated_tokens=usage.truncated_tokens,
                blend=usage.blend,
            ),
            prompt_logprobs=None if of_prompt is None else (None, *of_prompt.each()),
        )


def _hear(choice: Choice, event: TokenEvent) -> None:
    if event.finish_reason == "error":
        raise event.refusal or MnemeError(f"{event.request_id}: {event.error}")
    choice.last_s = time.perf_counter()
    if choice.first_s is None and event.token_ids:
        choice.first_s = choice.last_s
    choice.add(event)


def _completion(choice: Choice, said: Delta) -> CompletionOutput:
    """Return a choice that has ended, of which all was said at once."""
    last = said.token_ids[-1:] if said.finish_reason == "stop" else ()
    stop_token_id = next((each for each in last if each in choice.request.sampling.stop_token_ids), None)
    return CompletionOutput(
        index=choice.index,
        text=said.text,
        token_ids=said.token_ids,
        finish_reason=said.finish_reason or "",
        stop_reason=stop_token_id if choice.stream.stop_string is None else choice.stream.stop_string,
        logprobs=None if said.logprobs is None else tuple(said.logprobs),
    )
