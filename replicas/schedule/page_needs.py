"""How many tokens' pages the requests that were taken may come to need, so that no pin ends one of them.

A request that named `max_tokens` gets them. One that did not gets what there is: it needs room for one token more, and
a pin lowers what it may have. A turn that is queued behind its own session may find as much history as the turns
before it can leave. What it comes to is then bounded by the capacity that it was taken under.

Policy only: no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from mneme.replicas.request import GenerationRequest
from mneme.replicas.sequence import Sequence
from mneme.replicas.sessions.sessions import Sessions
from mneme.replicas.sessions.token_log import TokenLog, turn_name


def num_needed_tokens(sequence: Sequence) -> int:
    """Tokens that a started request must be able to have."""
    params = sequence.request.sampling
    num_output = sequence.max_tokens
    if params.max_tokens is None:
        num_output = max(sequence.num_output + 1, min(params.min_tokens, sequence.max_tokens))
    num_tokens = sequence.num_prompt - sequence.num_unseen + num_output
    return num_tokens if sequence.window is None else min(num_tokens, sequence.window)


def limit_output(sequences: Iterable[Sequence], capacity: int) -> None:
    """Pages were pinned: requests that named no `max_tokens` end at `capacity` tokens, prompt and output together.

    Those that are truncated when they outgrow their window have a smaller one.
    """
    for sequence in sequences:
        if sequence.window is not None:
            sequence.window = min(sequence.window, capacity)
        elif sequence.request.sampling.max_tokens is None:
            sequence.max_tokens = min(sequence.max_tokens, capacity - sequence.num_prompt)


def num_queued_tokens(sessions: Sessions, started: Iterable[Sequence], capacity: int) -> int:
    """Tokens that the longest turn may need that waits behind its own session; 0 if none waits."""
    sequence_by_id = {sequence.request.request_id: sequence for sequence in started}
    logs = sessions.queued.logs
    return min(max((_of_session(log, sequence_by_id, capacity) for log in logs), default=0), capacity)


def _of_session(log: TokenLog, sequence_by_id: Mapping[str, Sequence], capacity: int) -> int:
    assert log.running is not None, "a turn waits for another"
    answering = [sequence_by_id[name] for name in log.running.answering if name in sequence_by_id]
    history = max([len(log.ids), *(sequence.num_prompt + sequence.max_tokens for sequence in answering)])
    needed = 0
    for _, choices in groupby(log.running.queue, turn_name):
        turn = list(choices)
        prompts = [_num_prompt(request, history) for request in turn]
        for num_prompt, request in zip(prompts, turn, strict=True):
            params = request.sampling
            needed = max(needed, num_prompt + (params.max_tokens or max(params.min_tokens, 1)))
        limit = turn[0].sampling.max_tokens
        history = max(history, capacity if limit is None else prompts[0] + limit)
    return needed


def _num_prompt(request: GenerationRequest, num_history: int) -> int:
    """Text may be matched to the ids of the history, which may be more than its own."""
    is_matched = request.append or request.prompt_text is not None
    return len(request.prompt_token_ids) + (num_history if is_matched else 0)
