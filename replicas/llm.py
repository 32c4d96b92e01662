"""The offline API: an engine in this process, no server, no Ray."""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mneme.cachetier.cache_config import CacheConfig
from mneme.config import parse
from mneme.errors import InvalidRequest, MnemeError
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine import BLOCKED_S
from mneme.replicas.llm_output import Job, RequestOutput
from mneme.replicas.load import load_engine
from mneme.replicas.model_directory import model_directory
from mneme.replicas.pins import PinKey
from mneme.replicas.prompt_prefix import conversation_prefix, num_system_tokens
from mneme.replicas.request import GenerationRequest, SamplingParams, TokenEvent
from mneme.replicas.tokenizer import Tokenizer
from mneme.replicas.truncation import Truncation, resolved
from mneme.replicas.warm_prompts import PUBLIC

# What OpenAI's completions API and vLLM give a prompt that asks for nothing else.
DEFAULT_COMPLETION = SamplingParams(max_tokens=16)
_WRITE_S = 5.0  # at most, until what was said is in the logs of sessions


class LLM:
    """Generate in batches: `LLM("mneme-tiny").generate(["Hello"])[0].outputs[0].text`.

    model   "mneme-tiny" (embedded) or a Hugging Face model directory
    device  "auto", "cpu", "cuda", "cuda:1"
    dtype   "float32", "bfloat16", "float16"; None: bfloat16 where the hardware has it (on a CPU for 16-bit checkpoints)
    config  `EngineConfig` or a mapping of its fields
    cache   `CacheConfig` or a mapping of its fields: KV kept in memory and files beyond the engine's pages; None: none

    Raises `CheckpointError` or `ConfigError`. Not thread-safe.
    """

    def __init__(
        self,
        model: str = "mneme-tiny",
        device: str = "auto",
        dtype: str | None = None,
        config: EngineConfig | Mapping[str, Any] | None = None,
        cache: CacheConfig | Mapping[str, Any] | None = None,
    ) -> None:
        base = config if isinstance(config, EngineConfig) else parse(EngineConfig, config or {}, "config")
        if cache is not None and not isinstance(cache, CacheConfig):
            cache = parse(CacheConfig, cache, "cache")
        chosen = parse(EngineConfig, {"device": device, "dtype": dtype or base.dtype})
        self.tokenizer = Tokenizer.load(model_directory(model))
        self._engine = load_engine(
            model, replace(base, device=chosen.device, dtype=chosen.dtype), tokenizer=self.tokenizer, cache=cache
        )
        self._tier_answered = threading.Event()
        if self._engine.chunks is not None:
            self._engine.chunks.tell(self._tier_answered.set)
        self._default_truncation = base.truncation
        self._ids = itertools.count()
        self._random = random.Random()

    @property
    def stats(self) -> dict[str, Any]:
        """The engine's counters and gauges."""
        return self._engine.stats()

    def close(self) -> None:
        """Give back the host tier's memory; garbage collection does so too."""
        self._engine.close()

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        session_ids: Sequence[str | None] | None = None,
        truncation: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (text, or token ids); one entry of the others per prompt, or one for all.

        Without `sampling_params` an answer has at most 16 tokens. `truncation` (fields of `Truncation`) says what
        happens to what does not fit the window; sessions have `EngineConfig.truncation` without it.

        Raises `InvalidRequest` or another `MnemeError`; nothing of the call runs on then.
        """
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        _check_prompts(listed)
        params = _one_per_prompt("sampling_params", sampling_params or DEFAULT_COMPLETION, len(listed))
        sessions = _one_per_prompt("session_ids", session_ids, len(listed))
        jobs = [
            Job(self.tokenizer, self._requests(prompt, param, session, self._truncation(truncation, session)))
            for prompt, param, session in zip(listed, params, sessions, strict=True)
        ]
        self._run(jobs)
        return [job.output() for job in jobs]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        session_id: str | None = None,
        documents: Sequence[str] | None = None,
        truncation: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """Answer a conversation through the model's chat template; `truncation` as in `generate`."""
        if documents:
            raise InvalidRequest("documents", len(documents), "reusable documents are not supported yet")
        text = self.tokenizer.render_chat(messages)
        ids, encode = self.tokenizer.encode_rendered(text), self.tokenizer.encode_rendered
        resolved_truncation = self._truncation(truncation, session_id)
        requests = self._requests(ids, sampling_params or SamplingParams(), session_id, resolved_truncation, text)
        if resolved_truncation is not None and resolved_truncation.keep == "system":
            num_system = num_system_tokens(self.tokenizer.render_chat, encode, messages, ids)
            requests = [replace(request, num_system=num_system) for request in requests]
        job = Job(self.tokenizer, requests)
        self._run([job])
        return job.output()

    def warm(self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]], ttl_s: float | None = None) -> str:
        """Compute a prompt (text, token ids, or the first messages of a chat) and keep its KV; returns the pin's name.

        Raises `PinRefused` or another `MnemeError`.
        """
        key = PinKey(PUBLIC.name, f"llm-{next(self._ids)}")
        self._engine.pins.warm(key, PUBLIC.salt, tuple(self._prefix_ids(prompt)), ttl_s=ttl_s)
        while self._engine.has_work:
            self._step()
        described = self._engine.pins.describe(key)
        error = MnemeError("the prompt was let go before it was computed") if described is None else described["error"]
        if error is not None:
            self._engine.pins.drop(key)
            raise error
        return key.pin_id

    def unpin(self, name: str) -> bool:
        """Let go of what `warm` keeps; returns whether it was kept."""
        return self._engine.pins.drop(PinKey(PUBLIC.name, name))

    def _prefix_ids(self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        messages = [each for each in prompt if isinstance(each, Mapping)]
        if messages and len(messages) == len(prompt):
            return conversation_prefix(self.tokenizer.render_chat, self.tokenizer.encode_rendered, messages)
        _check_prompts([prompt])
        return [each for each in prompt if isinstance(each, int)]

    def _truncation(self, given: Mapping[str, Any] | None, session_id: str | None) -> Truncation | None:
        return resolved(given, self._default_truncation, has_session=session_id is not None)

    def _requests(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        session_id: str | None,
        truncation: Truncation | None,
        text: str | None = None,
    ) -> list[GenerationRequest]:
        """One request per choice."""
        if isinstance(prompt, str):
            text, ids = prompt, self.tokenizer.encode(prompt, add_special_tokens=True)
        else:
            ids = list(prompt)
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        name = f"llm-{next(self._ids)}"
        return [
            GenerationRequest(
                request_id=f"{name}.{index}",
                prompt_token_ids=tuple(ids),
                sampling=replace(params, seed=seed),
                choice_index=index,
                session_id=session_id,
                prompt_text=text,
                truncation=truncation,
            )
            for index in range(params.n)
        ]

    def _run(self, jobs: list[Job]) -> None:
        self._engine.pins.expire()
        job_by_id = {request.request_id: job for job in jobs for request in job.requests}
        unsent = deque(request for job in jobs for request in job.requests)
        durable = self._engine.durable
        if durable is not None:
            durable.restore(self._engine.sessions, unsent)
        try:
            while unsent or self._engine.has_work:
                while unsent and self._engine.has_room_for(unsent[0]):
                    self._engine.submit(unsent.popleft())
                if self._engine.is_blocked:
                    self._tier_answered.wait(BLOCKED_S)
                self._tier_answered.clear()
                for event in self._step():
                    if event.request_id in job_by_id:
                        job_by_id[event.request_id].take(event)
        finally:  # an error, or Ctrl-C: nothing of this call may run on
            for request_id in job_by_id:
                self._engine.abort(request_id)
            self._engine.take_events()
            if durable is not None:
                durable.writer.flush(_WRITE_S)

    def _step(self) -> list[TokenEvent]:
        try:
            return self._engine.step()
        except BaseException:  # Ctrl-C too: what the step was to compute is not there
            self._engine.fail_all("the step was not completed")
            raise


def _one_per_prompt(name: str, value: Any, num_prompts: int) -> list[Any]:
    if value is None or isinstance(value, SamplingParams):
        return [value] * num_prompts
    if isinstance(value, str) or len(value) != num_prompts:
        raise InvalidRequest(name, value, f"must have one entry for each of the {num_prompts} prompts")
    return list(value)


def _check_prompts(prompts: Sequence[object]) -> None:
    for prompt in prompts:
        is_ids = isinstance(prompt, Sequence) and all(type(token_id) is int for token_id in prompt)
        if not isinstance(prompt, str) and not is_ids:
            raise InvalidRequest("prompts", prompt, "each must be a string or a list of token ids")
