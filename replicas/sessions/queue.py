"""Turns that wait for an earlier turn of their session, in order of arrival. Policy only: no tensors."""

from __future__ import annotations

from mneme.errors import Overloaded
from mneme.replicas.request import GenerationRequest
from mneme.replicas.sessions.token_log import RunningTurn, TokenLog, turn_name

MAX_QUEUED_PER_SESSION = 64  # so that one session cannot fill the engine's queue


class TurnQueue:
    """The queues of all sessions' running turns, by request; the queues themselves are in the token logs."""

    def __init__(self) -> None:
        self._log_by_request: dict[str, TokenLog] = {}
        self.num_tokens = 0  # of their prompts

    def __len__(self) -> int:
        return len(self._log_by_request)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._log_by_request

    @property
    def request_ids(self) -> list[str]:
        return list(self._log_by_request)

    @property
    def logs(self) -> list[TokenLog]:
        """Each session behind whose turn something waits, once."""
        return list({id(log): log for log in self._log_by_request.values()}.values())

    def put(self, log: TokenLog, running: RunningTurn, request: GenerationRequest) -> None:
        """Let a request wait behind the log's turn that is answering; raises `Overloaded` if too many do."""
        if len(running.queue) >= MAX_QUEUED_PER_SESSION:
            raise Overloaded(f"{MAX_QUEUED_PER_SESSION} requests of this session are waiting")
        running.queue.append(request)
        self.num_tokens += len(request.prompt_token_ids)
        self._log_by_request[request.request_id] = log

    def cancel(self, request_id: str) -> GenerationRequest | None:
        """Take a request out; None if it does not wait."""
        log = self._log_by_request.pop(request_id, None)
        if log is None or log.running is None:
            return None
        queue = log.running.queue
        request = next(request for request in queue if request.request_id == request_id)
        queue.remove(request)
        self.num_tokens -= len(request.prompt_token_ids)
        return request

    def take_turn(self, running: RunningTurn) -> list[GenerationRequest]:
        """The requests of the next turn behind this one, which are answering from now on."""
        running.name = turn_name(running.queue[0])
        turn: list[GenerationRequest] = []
        while running.queue and turn_name(running.queue[0]) == running.name:
            request = running.queue.popleft()
            del self._log_by_request[request.request_id]
            self.num_tokens -= len(request.prompt_token_ids)
            running.answering.add(request.request_id)  # all of them now: the turn ends with its last choice
            turn.append(request)
        return turn
