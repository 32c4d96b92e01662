"""Holds what the routes share: each model's engine client and tokenizer, and the threads that do blocking work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request

from mneme.cluster.config import HttpConfig
from mneme.cluster.http.body import check_json_type, parse_json_object
from mneme.cluster.http.window.requests import RequestLog
from mneme.cluster.metrics.exposition import MetricsPage
from mneme.cluster.metrics.latency import Clock, ModelLatencies
from mneme.cluster.metrics.spans import Traces
from mneme.cluster.serve.engine_client import Condition, EngineClient
from mneme.cluster.wire.openai import Message, conversation
from mneme.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, Overloaded
from mneme.primitives import Bounded
from mneme.replicas.config import EngineConfig
from mneme.replicas.documents import BlendOptions
from mneme.replicas.request import Grammar, History, SamplingDefaults
from mneme.replicas.text.calls.dialects import with_plugin
from mneme.replicas.text.document_parts import EncodedPrompt, Part, StandIns, encode_parts
from mneme.replicas.text.grammar import GrammarChecker
from mneme.replicas.text.prompts import (
    Appended,
    conversation_prefix,
    num_system_tokens,
    render_appended,
    render_unfinished,
    takes_notes,
)
from mneme.replicas.text.tokenizer import Tokenizer
from mneme.replicas.text.tool_calls import Dialect, message_digest
from mneme.replicas.truncation import MAX_WINDOWS, Truncation

T = TypeVar("T")

MAX_COMPILING = 16  # new grammars at once; each takes 2 s of processor time at most
MAX_PROMPT_RECORDS = 1024  # some bytes for each 64 tokens
_SMALL_TEXT_CHARS = 4096  # about 1 ms of tokenizing: less than handing it to a thread may cost on a busy machine


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as clients see it."""

    id: str  # answers, metrics and logs have this one
    max_context: int  # tokens of prompt and output together
    created: int  # Unix seconds
    root: str | None = None  # the model's directory, for load tools on the same machine; else its name
    aliases: tuple[str, ...] = ()  # further names
    sampling_defaults: SamplingDefaults = field(default_factory=dict)  # the model's own, where a request says nothing

    @property
    def names(self) -> tuple[str, ...]:
        return (self.id, *self.aliases)


class Backend(NamedTuple):
    """A model, and what answers for it."""

    client: EngineClient
    model: ServedModel
    tokenizer: Tokenizer
    truncation: Truncation = Truncation()  # of sessions that outgrow the window, where a request says nothing
    blend: BlendOptions = BlendOptions()  # of documents, where a request says nothing
    default_timeout_s: float | None = None  # of requests that name none
    max_waiting: int = EngineConfig().max_waiting  # choices of one request, as a replica's queue takes no more


@dataclass(slots=True, kw_only=True)
class ApiState:
    """One per model."""

    client: EngineClient
    model: ServedModel
    tokenizer: Tokenizer
    truncation: Truncation = field(default_factory=Truncation)
    blend: BlendOptions = field(default_factory=BlendOptions)
    default_timeout_s: float | None = None
    max_waiting: int = EngineConfig().max_waiting
    config: HttpConfig
    latencies: ModelLatencies
    clock: Clock = time.perf_counter
    wall_clock: Clock = time.time
    draw_seed: Callable[[], int] = lambda: secrets.randbits(63)
    # Templates may hang until they are killed: they have threads of their own, so that tokenizing goes on
    # meanwhile.
    _template_threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "template"))
    _tokenizer_threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "tokenizer"))
    _grammar_thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "grammar"))
    _num_compiling: int = 0  # grammars, the waiting ones too
    _takes_notes: bool | None = None  # None: nobody has asked
    _grammars: GrammarChecker = field(init=False)
    dialect: Dialect = field(init=False)
    # Of messages whose clients ask what became of their prefix, by tenant and id: `messages.PromptRecord`.
    prompts: Bounded[tuple[str, str], Any] = field(default_factory=lambda: Bounded(MAX_PROMPT_RECORDS))
    requests: RequestLog = field(default_factory=lambda: RequestLog(time.time))

    def __post_init__(self) -> None:
        self._grammars = GrammarChecker(self.tokenizer)
        parsers = (self.config.tool_call_parser, self.config.reasoning_parser)
        self.dialect = Dialect(self.tokenizer, *parsers, with_plugin(self.config.tool_parser_plugin))

    async def parsed(self, request: Request) -> dict[str, Any]:
        """The request's body, a JSON object; it can be taken once."""
        check_json_type(request.headers)
        body: bytes = request.state.body.pop()
        return await self.off_loop(len(body), lambda: parse_json_object(body))

    async def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool,
        template_variables: Mapping[str, Any] | None = None,
        appends: bool = False,
        truncation: Truncation | None = None,
        documents: Sequence[object] = (),
        is_cut: bool = False,
        continues: bool = False,
    ) -> EncodedPrompt:
        """The prompt of a conversation, or what it grows by; the template runs off the event loop.

        documents  those that are in no message
        is_cut     as `encode` has it
        continues  the answer goes on with the last message
        """

        def work() -> EncodedPrompt:
            stand_ins = StandIns(documents)
            render = partial(
                self.tokenizer.render_chat,
                add_generation_prompt=add_generation_prompt,
                template_variables={**(template_variables or {}), **stand_ins.variables},
            )
            said = conversation(messages, stand_ins)
            whole = partial(render_unfinished, render) if continues else render
            how = partial(render_appended, render) if appends else lambda some: Appended(whole(some), 0)
            text, num_closing_chars = stand_ins.placed(how, said)
            parts = stand_ins.cut(text)
            fits_any = is_cut or truncation is not None
            prompt = self.encode("messages", parts, add_special_tokens=False, is_cut=fits_any)
            if appends or truncation is None or truncation.keep != "system":
                return prompt._replace(num_closing_chars=num_closing_chars)
            encode = partial(stand_ins.encode_prefix, self.tokenizer)
            return prompt._replace(num_system=num_system_tokens(render, encode, said, prompt.token_ids))

        return await asyncio.get_running_loop().run_in_executor(self._template_threads, work)

    async def takes_notes(self) -> bool:
        """Return whether the chat template has a place for system messages within a conversation."""
        if self._takes_notes is None:
            loop, render = asyncio.get_running_loop(), self.tokenizer.render_chat
            self._takes_notes = await loop.run_in_executor(self._template_threads, takes_notes, render)
        return self._takes_notes

    async def history(self, messages: list[Message], template_variables: Mapping[str, Any]) -> History:
        """Say what was said, so that a session knows it again; how the answer is read is the caller's to fill in."""
        render = partial(self.tokenizer.render_chat, template_variables=template_variables)

        def work() -> History:
            said = conversation(messages, StandIns())
            last = max((i for i, message in enumerate(said) if message["role"] == "assistant"), default=None)
            digests = list(accumulate(said, message_digest, initial=json.dumps(template_variables).encode()))[1:]
            known, appended = b"", Appended("", 0)
            if last is not None and last + 1 < len(said):
                with contextlib.suppress(InvalidRequest):  # the template cannot go on behind a stand-in
                    known, appended = digests[last], render_appended(render, said[last + 1 :])
            if not appended.text:
                known = b""
            return History(digests[-1], known, *appended, False, {}, False, False, self.dialect.parsers)

        return await asyncio.get_running_loop().run_in_executor(self._template_threads, work)

    async def render_prefix(
        self, messages: list[Message], template_variables: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """Ids that every conversation begins with that begins with these messages."""
        render = partial(self.tokenizer.render_chat, template_variables=template_variables)

        def work() -> tuple[int, ...]:
            stand_ins = StandIns()
            encode = partial(stand_ins.encode_prefix, self.tokenizer)
            return tuple(conversation_prefix(render, encode, conversation(messages, stand_ins)))

        return await asyncio.get_running_loop().run_in_executor(self._template_threads, work)

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` here if its input of `size` characters or ids is small, else on a thread."""
        if size <= _SMALL_TEXT_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_threads, work)

    async def check_grammar(self, grammar: Grammar) -> None:
        """Raise `InvalidRequest` for a grammar that the model cannot follow, `Overloaded` where too many are new."""
        if self._grammars.knows(grammar):
            self._grammars.check(grammar)
            return
        if self._num_compiling >= MAX_COMPILING:
            raise Overloaded("too many new grammars at once")
        self._num_compiling += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._grammar_thread, self._grammars.check, grammar)
        finally:
            self._num_compiling -= 1

    def encode(
        self,
        field: str,
        given: str | Sequence[Part],
        *,
        add_special_tokens: bool,
        is_cut: bool = False,
    ) -> EncodedPrompt:
        """A text prompt; raises `ContextLengthExceeded` without tokenizing what can never fit.

        is_cut  what does not fit is cut off later: the prompt may have `MAX_WINDOWS` windows
        """
        parts = [Part(given)] if isinstance(given, str) else given
        text = "".join(part.text for part in parts)
        if self.tokenizer.min_num_tokens(text) >= self._max_given(is_cut):
            raise self._too_long(field, f"{len(text)} characters", is_cut)
        prompt = encode_parts(self.tokenizer, parts, add_special_tokens=add_special_tokens)
        if not prompt.token_ids:
            raise InvalidRequest(field, text, "must have at least one token")
        return prompt

    def encoded_ids(self, field: str, ids: list[int], *, is_cut: bool = False) -> EncodedPrompt:
        """A prompt of token ids; `is_cut` as `encode` has it."""
        self.check_ids(field, ids)
        if len(ids) >= self._max_given(is_cut):
            raise self._too_long(field, f"{len(ids)} tokens", is_cut)
        return EncodedPrompt(tuple(ids), None)

    def check_ids(self, field: str, ids: list[int]) -> None:
        size = self.tokenizer.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < size:
            worst = min(ids) if min(ids) < 0 else max(ids)
            raise InvalidRequest(field, worst, f"token ids are from 0 to {size - 1}")

    def num_last(self, given: int | None, max_tokens: int | None) -> int | None:
        """Return how many of a prompt's tokens `truncate_prompt_tokens` leaves; None: all. Raises `InvalidRequest`.

        -1 leaves as many as fit beside `max_tokens` of output, of which one at least.
        """
        most = self.model.max_context
        if given == -1:
            return max(most - max(max_tokens or 1, 1), 1)
        if given is not None and not 1 <= given <= most:
            raise InvalidRequest("truncate_prompt_tokens", given, f"must be from 1 to {most}, or -1")
        return given

    def _max_given(self, is_cut: bool) -> int:
        """Tokens of a prompt at which it is refused unread; what is truncated may be longer than the window."""
        return self.model.max_context * (MAX_WINDOWS if is_cut else 1)

    def _too_long(self, field: str, size: str, is_cut: bool) -> ContextLengthExceeded:
        what = "a prompt that is truncated has" if is_cut else "prompt and output together have"
        return ContextLengthExceeded(field, size, f"{what} at most {self._max_given(is_cut)} tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One per application: the models' states, the first one that of requests which name none."""

    apis: Sequence[ApiState]
    metrics: MetricsPage
    needs_key: bool
    requests: RequestLog
    traces: Traces | None  # None: no spans are wanted

    def of(self, name: str | None) -> ApiState:
        """Find a model by a name, or by `root` as `vllm bench serve` asks /tokenize. Raises `ModelNotFound`."""
        by_id = (api for api in self.apis if name is None or name in api.model.names)
        by_root = (api for api in self.apis if name == api.model.root)
        found = next(chain(by_id, by_root), None)
        if found is None:
            raise ModelNotFound(f"model: no model is called {str(name)[:80]!r}; GET /v1/models lists them")
        return found

    async def stats(self) -> dict[str, dict[str, Any]]:
        """Figures of all models' replicas, as `EngineClient.stats` has them."""
        each = await asyncio.gather(*(api.client.stats() for api in self.apis))
        return {replica_id: figures for stats in each for replica_id, figures in stats.items()}

    async def conditions(self) -> dict[str, Condition]:
        """Of each model."""
        found = await asyncio.gather(*(api.client.condition() for api in self.apis))
        return {api.model.id: each for api, each in zip(self.apis, found, strict=True)}

    async def first(self, name: str | None, ask: Callable[[ApiState], Awaitable[T]]) -> T:
        """Ask the named model, or without a name one after the other, until one knows what is asked for.

        Raises what the first one says if none does.
        """
        refusal: InvalidRequest | None = None
        for api in self.apis if name is None else [self.of(name)]:
            try:
                return await ask(api)
            except InvalidRequest as error:
                if error.http_status != 404:
                    raise
                refusal = refusal or error
        assert refusal is not None  # there is a model
        raise refusal
