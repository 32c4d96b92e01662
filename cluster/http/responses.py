"""/v1/responses: OpenAI's Responses API, kept in sessions.

Each stored response is a session of its own, named by the response's id: the token ids of all that led to it and of its
answer, and the object itself with its items as the session's note. So a response lives as long as its session does, in
the same log on disk and on a peer, and another API key knows nothing of it. What goes on from a response is a fork of
its session: with the same instructions only what is new is appended to its exact ids; with others the conversation is
rendered anew, as OpenAI does not carry instructions over.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Literal, NamedTuple, cast

from starlette.requests import Request

from mneme.cluster.http.api_state import ApiState
from mneme.cluster.http.completion_answers import token_logprobs
from mneme.cluster.http.completions import renamed, run_chat
from mneme.cluster.http.sessions import forget_session, fork_where_it_is
from mneme.cluster.http.stream import AnswerInParts, FieldNames, Part, RunResponse, written
from mneme.cluster.serve.engine_client import look_up_session, session_tokens
from mneme.cluster.tenancy import RESPONSE_PREFIX, kv_salt, session_key
from mneme.cluster.wire import answers
from mneme.cluster.wire.openai import IGNORED_HEADER, ChatRequest, validate
from mneme.cluster.wire.responses import (
    REASONING,
    Items,
    Offered,
    RawInput,
    ResponsesRequest,
    StoredResponse,
    chat_messages,
    sealed,
    usage_of,
)
from mneme.errors import InvalidRequest, MnemeError, Overloaded, ReplicaUnavailable, ResponseNotFound, SessionNotFound
from mneme.replicas import queries
from mneme.replicas.choices import Choice, Delta
from mneme.replicas.request import Logprobs, SessionKey
from mneme.replicas.text.prompts import num_common

logger = logging.getLogger(__name__)

_MAX_LISTED, _LISTED = 100, 20
_UNKEPT_TTL_S = 60.0  # of the session of what is not stored and goes on from a response
_SHOWN_TOKENS = 8  # from where two prompts differ
_HIT_SHARE = 0.9  # of what two prompts have in common, so much was found: a hit
_COMPARISON = "prompt_cache_options.comparison_response_id"
_OFFERS = '; truncation: "auto" shortens it'


class _Form(NamedTuple):
    """Says how items of one kind look."""

    prefix: str  # of their ids
    event: str  # that tells how they grow; empty: none does
    empty: dict[str, Any]  # what is theirs, when they begin


_FORMS = {
    "message": _Form("msg_", "output_text", {"role": "assistant", "content": []}),
    "reasoning": _Form("rs_", "reasoning_text", {"summary": [], "content": []}),
    "function_call": _Form("fc_", "function_call_arguments", {"arguments": ""}),
    "custom_tool_call": _Form("ctc_", "custom_tool_call_input", {"input": ""}),
    "tool_search_call": _Form("tsc_", "", {"execution": "client", "arguments": {}}),
}
_TRUE = ("true", "1", "yes", "on", "t", "y")  # as query parameters are written
# What a prompt begins with, and what a change of it is called.
_HEAD: Mapping[Literal["model", "instructions", "tools"], answers.CacheChange] = {
    "model": "model_changed",
    "instructions": "instructions_changed",
    "tools": "tools_changed",
}
# What chat completions call the fields of a body here.
_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.function.name": "tool_choice.name",
    "reasoning_effort": "reasoning.effort",
    r"tools(\[\d+\])\.function": r"tools\1",
}


async def create_response(
    api: ApiState, request: Request, body: ResponsesRequest
) -> RunResponse[answers.Response, answers.ResponseEvent]:
    """Answer an input, which may go on from an earlier response, and keep the answer unless `store` is false."""
    body.check()
    salt, tenant = kv_salt(request.state.tenant, body.cache_salt), request.state.tenant
    response_id = f"{RESPONSE_PREFIX}{request.state.request_id}"
    key = (salt, session_key(tenant, response_id))
    compared = None if body.prompt_cache_options is None else body.prompt_cache_options.comparison_response_id
    before, kept, home = None, None, ""
    if body.previous_response_id is not None:
        before = (salt, session_key(tenant, body.previous_response_id, "previous_response_id"))
        kept, home = await _found(api, before, "previous_response_id")
    history = [] if kept is None else kept.history
    items = body.items(response_id, history, await _referenced(api, request, body, history))
    for grammar in body.grammars():
        await api.check_grammar(grammar)
    offered = body.offered([*history, *items])
    if any(each.is_told for each in offered.values()):  # an answer is not held to it
        request.state.answer_headers.append((IGNORED_HEADER, b"tools.format.definition"))
    echo: answers.ResponseHead = {
        **body.echo(),
        "id": response_id,
        "object": "response",
        "created_at": int(api.wall_clock()),
        "model": api.model.id,
    }
    appends = kept is not None and all(kept.response.get(name) == echo[name] for name in _HEAD)
    said = items if kept is None or appends else [*history, *items]
    system = [{"role": "system", "content": body.instructions}] if body.instructions and not appends else []
    before_input = [*system, *chat_messages(said[: len(said) - len(items)])]
    marks = body.marks(len(before_input), items)
    asked = body.chat([*before_input, *chat_messages(items)], offered)
    if before is not None or body.keeps:
        ttl = {} if body.keeps else {"ttl_s": _UNKEPT_TTL_S}
        asked["session"] = {"id": response_id, "append": appends, **ttl}
    if body.truncation != "auto":
        asked["truncation"] = {"strategy": "error"}
    elif "session" not in asked or api.truncation.strategy == "error":
        asked["truncation"] = {"strategy": "recompute"}
    keeper = Keeper(
        api,
        key if "session" in asked else None,
        [*history, *filter(None, items)],
        None if compared is None else (salt, session_key(tenant, compared, _COMPARISON)),
    )

    def limit_of(left: int, wanted: int | None) -> int:
        """Leave half of what is left to the turns that go on from an answer without a limit of its own."""
        num_before = usage_of(kept.response)["total_tokens"] if kept is not None and appends else 0
        return max((left - num_before) // 2, 1) if wanted is None else wanted

    named = "input" if body.max_output_tokens is None else "max_output_tokens"
    fields = FieldNames("input", named, "" if body.truncation == "auto" else _OFFERS)
    seals = REASONING in (body.include or ())
    try:
        chat = validate(ChatRequest, asked)
        run = await run_chat(
            *(api, request, chat),
            lambda params: ResponsesAnswer(
                {**echo, "temperature": params.weighing.temperature, "top_p": params.weighing.top_p},
                keeper,
                offered,
                is_prewarm=body.is_prewarm,
                seals=seals,
            ),
            fields=fields,
            is_response=True,
            marks=marks,
            limit_of=limit_of,
        )
    except InvalidRequest as error:
        paths = {rf"tools\[{index}\]\.function": each.path for index, each in enumerate(offered.values())}
        raise fields.worded(renamed(error, {**paths, **_FIELDS})) from None
    if before is not None:
        fork_home = await _fork(api, before, key, home)

        async def delete_fork() -> None:
            with contextlib.suppress(MnemeError):
                await api.client.query(queries.DeleteSession(key), replica_id=fork_home)

        run.undo = delete_fork
    return run


async def get_response(api: ApiState, request: Request) -> answers.Response:
    """Return a response that was kept."""
    if request.query_params.get("stream", "").lower() in _TRUE:
        raise InvalidRequest("stream", True, "a response that has ended is not streamed again")
    return (await _kept(api, _key(request), "response_id")).response


async def delete_response(api: ApiState, request: Request) -> answers.Deleted:
    """Forget a response; those that go on from it stay."""
    key = _key(request)
    await _kept(api, key, "response_id")
    await forget_session(api, key)
    return {"id": request.path_params["response_id"], "object": "response", "deleted": True}


async def cancel_response(api: ApiState, request: Request) -> None:
    """Refuse: only what runs in the background could be cancelled; a stream is cancelled by closing it."""
    await _kept(api, _key(request), "response_id")
    raise InvalidRequest("response_id", None, "cannot cancel a synchronous response")


async def list_input_items(api: ApiState, request: Request) -> answers.ResponseItems:
    """List the items that led to a response's output, those of earlier responses too, newest first."""
    query = request.query_params
    order, after, limit = query.get("order", "desc"), query.get("after"), query.get("limit", str(_LISTED))
    if order not in ("asc", "desc"):
        raise InvalidRequest("order", order, "must be asc or desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= _MAX_LISTED):
        raise InvalidRequest("limit", limit, f"must be from 1 to {_MAX_LISTED}")
    items = (await _kept(api, _key(request), "response_id")).items[:: 1 if order == "asc" else -1]
    first = 0
    if after is not None:
        first = next((i + 1 for i, item in enumerate(items) if item["id"] == after), -1)
        if first < 0:
            raise InvalidRequest("after", after, "is no item of this response")
    page = items[first : first + int(limit)]
    return {
        "object": "list",
        "data": cast(list[answers.ResponseItem], page),
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": first + len(page) < len(items),
    }


class Keeper(NamedTuple):
    """Keeps a response with its session, and compares its prompt with an earlier one's."""

    api: ApiState
    key: SessionKey | None  # None: it has no session
    items: Items  # that lead to its output
    compared: SessionKey | None  # the response that its use of the cache is compared with

    async def keep(self, response: answers.Response, choice: Choice) -> None:
        """Keep it, if it is to be; says in it whether it is kept.

        An answer that was computed is given, though nobody can go on from it.
        """
        if self.compared is not None:
            response["prompt_cache_diagnostics"] = await self._diagnosed(self.compared, response, choice)
        is_kept = False
        try:
            if response["store"] and self.key is not None:
                size = 4 * usage_of(response)["total_tokens"]  # characters, about
                packed = await self.api.off_loop(size, StoredResponse(response, self.items).packed)
                note = queries.SetNote(self.key, packed)
                home = self.api.client.home_of(self.key)
                is_kept = home is not None and (await self.api.client.query(note, replica_id=home))[home]
                if not is_kept and (found := await look_up_session(self.api.client, self.key)) is not None:
                    is_kept = (await self.api.client.query(note, replica_id=found[0]))[found[0]]
        except MnemeError as error:
            logger.warning("response not kept id=%s: %s", response["id"], error)
        response["store"] = is_kept

    async def _diagnosed(
        self, compared: SessionKey, response: answers.Response, choice: Choice
    ) -> answers.CacheDiagnostics:
        """Say whether the prompt went on from the compared response's, else what changed and from which token on.

        A prompt that did, and was computed all the same, finds its KV gone, for which OpenAI has no reason.
        """
        try:
            before = (await _kept(self.api, compared, _COMPARISON)).response
            old = await self._tokens(compared, before)
            new = choice.request.prompt_token_ids if self.key is None else await self._tokens(self.key, response)
        except ResponseNotFound:
            return {"type": "comparison_response_not_found"}
        except MnemeError as error:
            logger.warning("prompt not compared id=%s: %s", response["id"], error)
            return {"type": "unavailable"}
        num_same, usage = num_common(old, new), usage_of(response)
        if num_same == min(len(old), len(new)) and response["model"] == before["model"]:
            is_found = usage["input_tokens_details"]["cached_tokens"] >= _HIT_SHARE * min(num_same, len(new) - 1)
            return {"type": "cache_hit" if is_found else "unavailable"}
        changes = (change for name, change in _HEAD.items() if response[name] != before[name])
        changed: answers.CacheChange = next(changes, "input_changed")
        reason: answers.CacheChange = "context_compacted" if choice.usage.truncated_tokens else changed
        shown = slice(num_same, num_same + _SHOWN_TOKENS)
        decode = self.api.tokenizer.decode
        return {
            "type": "cache_miss",
            "reason": reason,
            "cache_missed_tokens": len(new) - num_same,
            "comparison_reusable_tokens": num_same,
            "first_difference": {
                "token": num_same,
                "before": decode(list(old[shown])),
                "now": decode(list(new[shown])),
            },
        }

    async def _tokens(self, key: SessionKey, response: answers.Response) -> Sequence[int]:
        """The prompt of a response; of one that was truncated as many tokens of all there were."""
        known = await session_tokens(self.api.client, key, visible=False)
        if known is None:
            raise ResponseNotFound(None, key[1].partition(":")[2])
        return known.ids[: usage_of(response)["input_tokens"]]


class ResponsesAnswer(AnswerInParts[answers.Response, answers.ResponseEvent]):
    """A `response`, or the events of one, whose output grows item by item; of a prewarmed one there is none."""

    def __init__(
        self,
        echo: answers.ResponseHead,
        keeper: Keeper,
        offered: Mapping[str, Offered],
        *,
        is_prewarm: bool,
        seals: bool,
    ) -> None:
        """Begin one.

        offered  what the functions that it calls are, by name
        seals    reasoning is told as `encrypted_content`, too
        """
        super().__init__(is_silent=is_prewarm)
        self._echo, self._keeper, self._offered, self._seals = echo, keeper, offered, seals
        self._output: list[answers.ResponseItem] = []  # of each part
        self._input = RawInput()  # of the custom tool that is being called
        self._logprobs: list[answers.TokenLogprobs] = []  # of the message that is being told
        self._unsaid: list[Logprobs] = []  # of tokens that have not become text yet
        self._num_events = 0
        self._response: answers.Response | None = None  # once it is whole

    async def keep(self, choices: Sequence[Choice]) -> None:
        """See `Answer`."""
        assert self._response is not None
        await self._keeper.keep(self._response, choices[0])

    def failed(self, error: MnemeError) -> bytes:
        """See `Answer`."""
        code = "rate_limit_exceeded" if error.http_status == 429 else "server_error"
        response, told = self._object("failed"), self._event("failed")
        response["error"] = {"code": code, "message": str(error) or "internal error"}
        told["response"] = response
        return written([told])

    def _whole(self, choice: Choice) -> answers.Response:
        assert self._response is not None
        return self._response

    def _begin(self, choice: Choice) -> Iterator[answers.ResponseEvent]:
        response = self._object("in_progress")
        yield {**self._event("created"), "response": response}
        yield {**self._event("in_progress"), "response": response}

    def _add(self, delta: Delta) -> Iterator[answers.ResponseEvent]:
        self._unsaid = [] if delta.reasoning or delta.calls else [*self._unsaid, *(delta.logprobs or ())]
        yield from super()._add(delta)

    def _begin_part(self, part: Part) -> Iterator[answers.ResponseEvent]:
        tool = self._offered[part.name] if part.kind == "call" else None
        kind = part.kind if tool is None else tool.kind
        item_id = f"{_FORMS[kind].prefix}{self._echo['id'].removeprefix(RESPONSE_PREFIX)}_{part.index}"
        item: dict[str, Any] = {"id": item_id, "type": kind, "status": "in_progress"}
        if tool is not None:
            item["call_id"] = part.call_id
            item |= {"name": tool.name} if kind != "tool_search_call" else {}
            item |= {"namespace": tool.namespace} if tool.namespace else {}
        self._output.append(cast(answers.ResponseItem, item | deepcopy(_FORMS[kind].empty)))
        self._input = RawInput()
        yield {**self._event("output_item.added"), "output_index": part.index, "item": self._output[-1]}
        if "content" in self._output[-1]:
            yield {**self._of_item("content_part.added"), "part": _part(kind, "")}

    def _grow_part(self, part: Part, text: str) -> Iterator[answers.ResponseEvent]:
        kind = self._output[-1]["type"]
        if kind == "custom_tool_call":
            text = self._input.push(text)
        if not _FORMS[kind].event or (kind == "custom_tool_call" and not text):
            return
        grown = self._of_item(f"{_FORMS[kind].event}.delta")
        grown["delta"] = text
        if kind == "message":
            logprobs, self._unsaid = self._unsaid, []
            grown["logprobs"] = token_logprobs(self._keeper.api.tokenizer, logprobs, self._echo["top_logprobs"])
            self._logprobs += grown["logprobs"]
        yield grown

    def _end_part(self, part: Part, *, is_cut: bool) -> Iterator[answers.ResponseEvent]:
        item, kind, text = self._output[-1], self._output[-1]["type"], part.text
        event = _FORMS[kind].event
        if kind == "custom_tool_call" and (rest := self._input.end()):
            yield {**self._of_item(f"{event}.delta"), "delta": rest}
        if kind == "tool_search_call":
            item["arguments"] = part.arguments
        elif kind == "function_call":
            item["arguments"] = text
            yield {**self._of_item(f"{event}.done"), "arguments": text, "name": item["name"]}
        elif kind == "custom_tool_call":
            item["input"] = RawInput.of(text)
            yield {**self._of_item(f"{event}.done"), "input": item["input"]}
        else:
            said, done = _part(kind, text), self._of_item(f"{event}.done")
            item["content"], done["text"] = [said], text
            if kind == "message":
                said["logprobs"] = done["logprobs"] = self._logprobs
                self._logprobs = []
            elif self._seals:
                item["encrypted_content"] = sealed(text)
            yield done
            yield {**self._of_item("content_part.done"), "part": said}
        item["status"] = "incomplete" if is_cut else "completed"
        yield {**self._event("output_item.done"), "output_index": part.index, "item": item}

    def _end_parts(self, choice: Choice) -> Iterator[answers.ResponseEvent]:
        """Close what is open, and make the response; one that says nothing has an empty message."""
        if not self.parts and not self._is_silent:
            yield from self._open(Part("message", 0))
        yield from super()._end_parts(choice)
        is_cut = choice.finish_reason == "length" and not self._is_silent
        response = self._response = self._object("incomplete" if is_cut else "completed")
        response["output"], response["usage"] = self._output, self._usage(choice)
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(self._keeper.api.wall_clock())

    def _end(self, choice: Choice) -> Iterator[answers.ResponseEvent]:
        assert self._response is not None
        yield {**self._event(self._response["status"]), "response": self._response}

    def _object(self, status: answers.ResponseStatus) -> answers.Response:
        return {
            **self._echo,
            "status": status,
            "output": [],
            "usage": None,
            "error": None,
            "incomplete_details": None,
            "completed_at": None,
            "prompt_cache_diagnostics": None,
        }

    def _usage(self, choice: Choice) -> answers.ResponseUsage:
        usage, num_told = choice.usage, 0 if self._is_silent else choice.num_told
        thoughts = "".join(part.text for part in self.parts if part.kind == "reasoning")
        num_thought = len(self._keeper.api.tokenizer.encode(thoughts, add_special_tokens=False)) if thoughts else 0
        written = usage.prompt_tokens - usage.cached_tokens  # what is computed stays
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": written},
            "output_tokens": num_told,
            "output_tokens_details": {"reasoning_tokens": min(num_thought, num_told)},
            "total_tokens": usage.prompt_tokens + num_told,
        }

    def _of_item(self, kind: str) -> answers.ResponseEvent:
        item, told = self._output[-1], self._event(kind)
        told["item_id"], told["output_index"] = item["id"], len(self._output) - 1
        if "content" in item:
            told["content_index"] = 0
        return told

    def _event(self, kind: str) -> answers.ResponseEvent:
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._num_events - 1}


def _part(kind: str, text: str) -> answers.ResponseText:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def _kept(api: ApiState, key: SessionKey, field: str) -> StoredResponse:
    """Find a response that was kept; raises `ResponseNotFound`."""
    return (await _found(api, key, field))[0]


async def _found(api: ApiState, key: SessionKey, field: str) -> tuple[StoredResponse, str]:
    """Find it with the replica that has it. All copies are alike, so what is known of its log does not matter."""
    response_id = key[1].partition(":")[2]
    if not response_id.startswith(RESPONSE_PREFIX):  # a session that another API may change, and its notes
        raise ResponseNotFound(field, response_id)
    asked = queries.GetNote(key)
    answers = await api.client.query(asked)
    if not any(answers.values()) and (found := await look_up_session(api.client, key)) is not None:
        answers = await api.client.query(asked, replica_id=found[0])
    for replica_id, note in answers.items():
        if note:
            return await api.off_loop(len(note), partial(StoredResponse.unpacked, note)), replica_id
    raise ResponseNotFound(field, response_id)


async def _referenced(
    api: ApiState, request: Request, body: ResponsesRequest, before: Items
) -> dict[str, dict[str, Any]]:
    """Find the items of stored responses that an input names by ids, each of which has its response's. May raise."""
    found = {item["id"]: item for item in before}
    for index, item_id in body.references:
        own = re.fullmatch(r"[a-z]+_(\w+)_\d+", item_id)
        if item_id not in found and own is not None:
            tenant = request.state.tenant
            key = (kv_salt(tenant, body.cache_salt), session_key(tenant, f"{RESPONSE_PREFIX}{own[1]}", "input"))
            with contextlib.suppress(ResponseNotFound):
                found |= {item["id"]: item for item in (await _kept(api, key, "input")).history}
        if item_id not in found:
            raise InvalidRequest(f"input[{index}].id", item_id, "is no item of a stored response")
    return found


async def _fork(api: ApiState, before: SessionKey, key: SessionKey, home: str) -> str:
    """Begin a response's session where the one before it ended; returns the replica, which is `home` if that can."""
    try:
        forked = (await api.client.query(queries.ForkSession(before, key[1]), replica_id=home))[home]
        api.client.place_fork(key, home)
    except (SessionNotFound, ReplicaUnavailable):
        try:
            home, forked = await fork_where_it_is(api, before, key[1])
        except SessionNotFound:
            raise ResponseNotFound("previous_response_id", before[1].partition(":")[2]) from None
    if forked is None:
        raise Overloaded("there is no room for another session")
    return home


def _key(request: Request) -> SessionKey:
    tenant: str = request.state.tenant
    salt = kv_salt(tenant, request.query_params.get("cache_salt"))
    return salt, session_key(tenant, request.path_params["response_id"], "response_id")
