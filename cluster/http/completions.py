"""POST /v1/chat/completions, /v1/completions and /v1/embeddings: from a body to the response that runs it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from starlette.requests import Request

from mneme.cluster.http.api_state import ApiState
from mneme.cluster.http.completion_answers import ChatAnswer, CompletionAnswer, EmbeddingsAnswer
from mneme.cluster.http.stream import Answer, E, FieldNames, RunResponse, W
from mneme.cluster.tenancy import affinity_key, kv_salt, named_session_key, session_key
from mneme.cluster.wire import answers
from mneme.cluster.wire.anthropic import CacheMark
from mneme.cluster.wire.openai import (
    IGNORED_HEADER,
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    Message,
    SamplingBody,
    ToolUse,
)
from mneme.errors import DeadlineExceeded, InvalidRequest
from mneme.replicas.choices import Choice
from mneme.replicas.request import GenerationRequest, Grammar, PinnedPrefix, SamplingParams
from mneme.replicas.text.calls.answer_parser import AnswerParser
from mneme.replicas.text.document_parts import EncodedPrompt
from mneme.replicas.text.prompts import num_common
from mneme.replicas.text.tool_calls import refused_arguments
from mneme.replicas.truncation import Truncation, resolved

# What clients send with all requests of a conversation or an agent, one value for one replica, the first that is given:
# aiperf, SGLang, OpenCode and Codex, Claude Code, Dynamo, SMG, LiteLLM.
AFFINITY_HEADERS = (
    "X-Correlation-ID",
    "X-Session-Affinity",
    "session-id",
    "x-claude-code-session-id",
    "X-Dynamo-Session-ID",
    "X-SMG-Routing-Key",
    "x-litellm-session-id",
)
_EMBEDDED_AT_ONCE = 256  # texts of one request: chats find room in the queue beside them
_NOBODY_SAYS = "\u4e16\u754c"
_EMBEDDED = SamplingParams(max_tokens=1, temperature=0, seed=0, ignore_eos=True)


async def chat_completions(
    api: ApiState, request: Request, body: ChatRequest
) -> RunResponse[answers.ChatCompletion, answers.ChatChunk]:
    """Render the conversation, then run n choices of it."""
    return await run_chat(api, request, body, lambda params: ChatAnswer(api, request.state.request_id, body, params))


async def run_chat(
    api: ApiState,
    request: Request,
    body: ChatRequest,
    worded: Callable[[SamplingParams], Answer[W, E]],
    *,
    fields: FieldNames | None = None,
    is_response: bool = False,
    marks: Sequence[CacheMark] = (),
    limit_of: Callable[[int, int | None], int | None] | None = None,
) -> RunResponse[W, E]:
    """Run a conversation whose answer is `worded` as the API at hand has it.

    fields       what clients of that API call prompt and limit; None: as chat completions do
    is_response  its session has a response's id, and no header names another
    marks        up to where the prompt stays resident
    limit_of     given what the window leaves beside the prompt and what was asked for, how many tokens an answer may
                 have; None: what is left. Of a prompt that is truncated it is not asked
    """
    use = body.tool_use()
    body.check_continuation()
    params = await _sampling(api, body)
    if use is not None:
        params = await _with_tools(api, params, use)
    turn = _turn(api, request, body, num_prompts=1, is_response=is_response)
    last = api.num_last(body.truncate_prompt_tokens, params.max_tokens)
    prompt = await api.render(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        template_variables=body.variables,
        appends=body.appends,
        truncation=turn.truncation,
        documents=body.documents_beside,
        is_cut=last is not None,
        continues=body.continue_final_message,
    )
    _ignore_effort(api, request, body, "reasoning.effort" if is_response else "reasoning_effort")
    if limit_of is not None and turn.truncation is None:
        left = api.model.max_context - len(prompt.token_ids)
        params = replace(params, max_tokens=limit_of(left, params.max_tokens))
    tools, is_forced = (use.schema_by_name, use.is_forced) if use is not None else ({}, False)
    if api.dialect.shows_special_tokens(has_tools=bool(tools)):
        params = replace(params, skip_special_tokens=False)
    is_thinking = api.dialect.is_thinking(prompt.text or "")
    if is_thinking and params.grammar is not None and params.grammar.after is None:
        # Where no single token ends the reasoning there is none: the grammar holds from the answer's beginning.
        is_thinking = api.dialect.end_think_id is not None
        params = replace(params, grammar=replace(params.grammar, after=api.dialect.end_think_id))
    if turn.session is not None and not prompt.documents and not body.appends and not body.continue_final_message:
        drops_reasoning = body.session is not None and body.session.history == "log"
        if use is not None or drops_reasoning:
            history = await api.history(body.messages, body.variables)
            history = history._replace(
                drops_reasoning=drops_reasoning,
                tools=api.dialect.read_schemas(tools),
                is_forced=is_forced,
                is_thinking=is_thinking,
            )
            prompt = prompt._replace(history=history)
    named = fields or FieldNames("messages", body.max_tokens_field)
    return _run(
        api,
        request,
        body,
        turn,
        params,
        [prompt.last(last)],
        [named],
        worded(params),
        lambda: api.dialect.parser(tools, is_forced=is_forced, is_thinking=is_thinking),
        () if body.appends else await _pinned_prefixes(api, body, marks, prompt),
    )


async def _pinned_prefixes(
    api: ApiState, body: ChatRequest, marks: Sequence[CacheMark], prompt: EncodedPrompt
) -> tuple[PinnedPrefix, ...]:
    """Return what marks keep of a prompt; of each time the last one, as what comes before it is kept with it."""
    last = {mark.ttl_s: mark for mark in marks}.values()
    return tuple([await _pinned(api, body, mark, prompt) for mark in last])


async def _pinned(api: ApiState, body: ChatRequest, mark: CacheMark, prompt: EncodedPrompt) -> PinnedPrefix:
    """Find where a mark is in the prompt: as far as the conversation that ends there is written alike."""
    messages = body.messages[: mark.num_messages]
    if messages and mark.num_parts is not None and isinstance(messages[-1].content, list):
        content = messages[-1].content[: mark.num_parts]
        if len(content) < len(messages[-1].content):
            messages[-1] = messages[-1].model_copy(update={"content": content})
    if messages == body.messages:
        return PinnedPrefix(len(prompt.token_ids), mark.ttl_s)
    if not messages or messages[-1].role == "system":  # templates want somebody to speak
        messages.append(Message(role="user", content=_NOBODY_SAYS))
    begun = await api.render(
        messages,
        add_generation_prompt=False,
        template_variables=body.variables,
        truncation=Truncation(strategy="reuse_kv"),
    )
    return PinnedPrefix(num_common(begun.token_ids, prompt.token_ids), mark.ttl_s)


def _ignore_effort(api: ApiState, request: Request, body: ChatRequest, name: str) -> None:
    """Name an effort as ignored where the chat template knows neither it nor a switch."""
    source = api.tokenizer.tool_template_source if body.tools else api.tokenizer.chat_template_source
    if body.reasoning_effort is not None and not re.search(r"\b(reasoning_effort|enable_thinking)\b", source):
        request.state.answer_headers.append((IGNORED_HEADER, name.encode()))


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return the refusal of a chat request with what its field, or the one that holds it, is called in another API.

    names  that API's by a pattern of the chat API's, of which the first that fits counts
    """
    for pattern, name in names.items():
        field, num_fitting = re.subn(rf"^{pattern}(?=$|[.\[])", name, error.field or "")
        if num_fitting:
            return type(error)(field, error.value, error.rule)
    return error


async def _with_tools(api: ApiState, params: SamplingParams, use: ToolUse) -> SamplingParams:
    """Have the answer call tools as `use` says; raises `InvalidRequest`."""
    dialect, given = api.dialect, params.grammar
    if not use.schema_by_name:  # the answer calls nothing
        return params
    if use.is_forced and given is not None:
        raise InvalidRequest(given.field, None, "cannot be combined with a tool_choice that asks for a call")
    if not use.is_forced and dialect.tool_format is None:
        rule = (
            "this model's chat template has no place for tools that it may call; http.tool_call_parser names a format"
        )
        raise InvalidRequest("tools", None, f'{rule}, and tool_choice "required" works with any')
    grammar = None
    try:
        grammar = dialect.call_grammar(
            use.schema_by_name,
            is_forced=use.is_forced,
            is_one=use.is_one,
            otherwise=given,
            is_strict=use.is_strict,
        )
        if grammar is not None:
            await api.check_grammar(grammar)
    except InvalidRequest as error:
        if use.is_forced or use.is_strict or given is not None:
            raise _of_tool(error, grammar, use) from None
        grammar = None  # what is said of tools that may be called need not be understood
    return replace(params, grammar=grammar)


def _of_tool(error: InvalidRequest, grammar: Grammar | None, use: ToolUse) -> InvalidRequest:
    """Return the refusal of calls' grammar with the tool whose arguments it is about, if it is about one's."""
    found = None if grammar is None else refused_arguments(grammar, error.rule)
    if found is not None:
        name, rule = list(use.schema_by_name)[found[0]], found[1]
    elif error.field == "tools" and error.value in use.schema_by_name:
        name, rule = error.value, error.rule
    else:
        return error
    index = next(i for i, tool in enumerate(use.tools) if tool["function"]["name"] == name)
    return InvalidRequest(f"tools[{index}].function.parameters", None, rule)


async def completions(
    api: ApiState, request: Request, body: CompletionRequest
) -> RunResponse[answers.Completion, answers.CompletionChunk]:
    """Run n choices of each prompt; choice j of prompt i has index i * n + j."""
    params = await _sampling(api, body)
    given = body.prompts()
    turn = _turn(api, request, body, num_prompts=len(given))
    names = ["prompt"] if len(given) == 1 else [f"prompt[{i}]" for i in range(len(given))]
    last = api.num_last(body.truncate_prompt_tokens, params.max_tokens)

    def take(index: int) -> EncodedPrompt:
        name, prompt = names[index], given[index]
        is_cut = last is not None or turn.truncation_of(index) is not None
        if not isinstance(prompt, list):
            special = body.add_special_tokens and not body.appends
            return api.encode(name, prompt, add_special_tokens=special, is_cut=is_cut).last(last)
        return api.encoded_ids(name, prompt, is_cut=is_cut).last(last)

    size = sum(len(prompt) if isinstance(prompt, str | list) else sum(len(p.text) for p in prompt) for prompt in given)
    prompts = await api.off_loop(size, lambda: list(map(take, range(len(given)))))
    echoes = [_with_text(api, prompt) for prompt in prompts for _ in range(params.n)] if body.echo else ()
    answer = CompletionAnswer(api, request.state.request_id, body, params, echoes)
    fields = [FieldNames(name, body.max_tokens_field or name) for name in names]
    return _run(api, request, body, turn, params, prompts, fields, answer, is_prompt_only=body.is_prompt_only)


async def embeddings(api: ApiState, request: Request, body: EmbeddingsRequest) -> RunResponse[answers.Embeddings, None]:
    """Return the last hidden states of each text, pooled.

    A text runs as a request of one output token: all its tokens are computed, and nothing of it is kept.
    """
    given, timeout_s = body.inputs(), _time_left_s(api, request, body.timeout_s)
    names = ["input"] if len(given) == 1 else [f"input[{i}]" for i in range(len(given))]
    last = api.num_last(body.truncate_prompt_tokens, _EMBEDDED.max_tokens)

    def take(index: int) -> EncodedPrompt:
        name, is_cut = names[index], last is not None
        if isinstance(given[index], list):
            return api.encoded_ids(name, given[index], is_cut=is_cut).last(last)
        special = body.add_special_tokens
        return api.encode(name, given[index], add_special_tokens=special, is_cut=is_cut).last(last)

    prompts = await api.off_loop(sum(map(len, given)), lambda: list(map(take, range(len(given)))))
    request_id, choices = request.state.request_id, list[Choice]()
    for index, prompt in enumerate(prompts):
        own = GenerationRequest(
            request_id=f"{request_id}-{index}.0",
            prompt_token_ids=prompt.token_ids,
            sampling=_EMBEDDED,
            salt=kv_salt(request.state.tenant, None),
            pooling=body.pooling,
            timeout_s=timeout_s,
        )
        choices.append(Choice(index=index, prompt_index=index, request=own, tokenizer=api.tokenizer))
    return RunResponse(
        api=api,
        choices=choices,
        fields=[FieldNames(name, name) for name in names],
        answer=EmbeddingsAnswer(api.model.id, body),
        num_at_once=min(_EMBEDDED_AT_ONCE, api.max_waiting),
    )


class _Turn(NamedTuple):
    """Holds what a request says about its session; only the first prompt is a turn, as a session has one at a time."""

    session: str | None
    truncation: Truncation | None  # None: what is too long is refused

    def truncation_of(self, prompt_index: int) -> Truncation | None:
        is_first, truncation = prompt_index == 0, self.truncation
        return truncation if is_first or truncation is None or truncation.strategy != "reuse_kv" else None


def _turn(
    api: ApiState,
    request: Request,
    body: SamplingBody,
    *,
    num_prompts: int,
    is_response: bool = False,
) -> _Turn:
    session = _session(request, body, is_response=is_response)
    if body.session is not None and session is None and (body.appends or body.session.ttl_s is not None):
        raise InvalidRequest("session.id", None, "must name the session")
    if body.appends and num_prompts > 1:
        raise InvalidRequest("prompt", num_prompts, "only one prompt can be appended to a session")
    given = body.truncation.given() if body.truncation is not None else None
    truncation = resolved(given, api.truncation, has_session=session is not None)
    if truncation is not None:
        truncation.check_window(api.model.max_context)
    return _Turn(session, truncation)


def _session(request: Request, body: SamplingBody, *, is_response: bool) -> str | None:
    """Take it from the header, else the body's `session.id` or `session_id`, in this order."""
    header = None if is_response else request.headers.get("x-session-id")
    given = {
        "X-Session-ID": None if header is None else header.encode("latin-1").decode(),  # `Guard` has seen that it can
        "session.id": body.session.id if body.session is not None else None,
        "session_id": body.session_id,
    }
    tenant: str = request.state.tenant
    key = session_key if is_response else named_session_key
    sessions = [key(tenant, name, field) for field, name in given.items() if name is not None]
    return sessions[0] if sessions else None


async def _sampling(api: ApiState, body: ChatRequest | CompletionRequest) -> SamplingParams:
    params = body.sampling_params(api.draw_seed()).with_defaults(api.model.sampling_defaults)
    api.check_ids("logit_bias", list(params.logit_bias))
    api.check_ids("stop_token_ids", list(params.stop_token_ids))
    api.check_ids("allowed_token_ids", list(params.allowed_token_ids or ()))
    body.check_stream_options()
    body.check_truncation()
    if params.grammar is not None:
        await api.check_grammar(params.grammar)
    return params


def _with_text(api: ApiState, prompt: EncodedPrompt) -> EncodedPrompt:
    if prompt.text is not None:
        return prompt
    return prompt._replace(text=api.tokenizer.decode(prompt.token_ids, skip_special_tokens=True))


def _run(
    api: ApiState,
    request: Request,
    body: SamplingBody,
    turn: _Turn,
    params: SamplingParams,
    prompts: Sequence[EncodedPrompt],
    fields: Sequence[FieldNames],
    answer: Answer[W, E],
    make_parser: Callable[[], AnswerParser | None] = lambda: None,
    pinned: tuple[PinnedPrefix, ...] = (),
    *,
    is_prompt_only: bool = False,
) -> RunResponse[W, E]:
    """Make a request of each choice; ids are `<turn>.<choice index>`, a turn for each prompt."""
    if len(prompts) * params.n > api.max_waiting:
        name, rule = ("prompt", "prompts x n") if len(prompts) > 1 else ("n", "choices")
        raise InvalidRequest(name, None, f"{rule} may be {api.max_waiting} here (engine.max_waiting)")
    request_id: str = request.state.request_id
    turns = [request_id] if len(prompts) == 1 else [f"{request_id}-{i}" for i in range(len(prompts))]
    salt, affinity = kv_salt(request.state.tenant, body.cache_salt), _affinity(request, body)
    timeout_s = _time_left_s(api, request, body.timeout_s)
    blend = api.blend.updated({} if body.blend is None else body.blend.given())
    choices: list[Choice] = []
    for i, prompt in enumerate(prompts):
        for j in range(params.n):
            engine_request = GenerationRequest(
                request_id=f"{turns[i]}.{j}",
                prompt_token_ids=prompt.token_ids,
                sampling=params,
                choice_index=j,
                num_choices=len(prompts) * params.n,
                salt=salt,
                session_id=turn.session if i == 0 else None,
                affinity=affinity,
                prompt_text=prompt.text,
                append=body.appends,
                num_closing_chars=prompt.num_closing_chars,
                session_ttl_s=body.session.ttl_s if body.session is not None else None,
                truncation=turn.truncation_of(i),
                num_system=prompt.num_system,
                history=prompt.history if i == 0 else None,
                pinned=pinned if j == 0 else (),
                documents=prompt.documents,
                blend=blend,
                priority=body.whole_priority,
                timeout_s=timeout_s,
            )
            engine_request.check_prompt_logprobs("echo" if body.prompt_logprobs is None else "prompt_logprobs")
            choices.append(
                Choice(
                    index=len(choices),
                    prompt_index=i,
                    request=engine_request,
                    tokenizer=api.tokenizer,
                    parser=make_parser(),
                    is_prompt_only=is_prompt_only,
                )
            )
    return RunResponse(api=api, choices=choices, fields=fields, answer=answer, is_stream=bool(body.stream))


def _time_left_s(api: ApiState, request: Request, asked_s: float | None) -> float | None:
    """Seconds to the request's deadline, if it has one; raises `DeadlineExceeded` if that has passed."""
    timeout_s = api.default_timeout_s if asked_s is None else asked_s
    if timeout_s is None:
        return None
    arrived_s: float = request.state.arrived_s
    left_s = timeout_s - (api.clock() - arrived_s)
    if left_s <= 0:
        raise DeadlineExceeded
    return left_s


def _affinity(request: Request, body: SamplingBody) -> str | None:
    """The key that requests which belong together share: `prompt_cache_key`, else the first of those headers."""
    hints = [body.prompt_cache_key, *map(request.headers.get, AFFINITY_HEADERS)]
    hint = next(filter(None, hints), None)
    return None if hint is None else affinity_key(request.state.tenant, hint)
