"""Sessions, appended turns, forks and explanations, as an HTTP client meets them."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from mneme.cluster.wire.openai import MAX_TTL_S
from mneme.errors import ReplicaUnavailable, SessionNotFound
from mneme.replicas.queries import ForkSession
from mneme.replicas.request import GenerationRequest, SamplingParams, TokenEvent
from tests.cluster.api_fixtures import CHAT, COMPLETION, TOKENIZER, api, body_of, post, serving
from tests.cluster.fake_engine_client import SENTENCE, FakeEngineClient

NEXT = [{"role": "user", "content": "a dog"}]
KEYS = {"api_keys": ["key-one-1234567890", "key-two-1234567890"]}


def chat(client: TestClient, status: int = 200, headers: Any = None, **changes: Any) -> Any:
    return body_of(client.post("/v1/chat/completions", json={**CHAT, **changes}, headers=headers), status)


def get(client: TestClient, path: str, status: int = 200, headers: Any = None) -> Any:
    return body_of(client.get(path, headers=headers), status)


def ids_of(engine: FakeEngineClient) -> list[int]:
    log = engine.sessions.get(("", "public:s"))
    assert log is not None
    ids: list[int] = log.ids.tolist()
    return ids


def test_a_session_from_its_first_turn_to_its_end(client: TestClient) -> None:
    assert get(client, "/v1/sessions/s", 404)["error"]["code"] == "session_not_found"
    usage = chat(client, session_id="s")["usage"]
    found = get(client, "/v1/sessions/s")
    assert (found["id"], found["object"], found["replica"], found["turns"]) == ("s", "session", "b", 1)
    assert found["tokens"] == usage["total_tokens"] == sum(found["kv"].values())
    assert found["answering"] is False
    assert 3590 < found["expires_in_s"] <= 3600
    deleted = client.delete("/v1/sessions/s")
    assert deleted.json() == {"id": "s", "object": "session.deleted", "deleted": True}
    assert client.delete("/v1/sessions/s").status_code == 404
    get(client, "/v1/sessions/s", 404)


def test_an_appended_turn_runs_what_the_whole_conversation_would(client: TestClient, engine: FakeEngineClient) -> None:
    first = chat(client, session_id="s", max_tokens=9)
    answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    chat(client, session={"id": "s", "append": True}, messages=NEXT)
    whole = TOKENIZER.render_chat([*CHAT["messages"], answer, *NEXT])
    assert TOKENIZER.decode(ids_of(engine), skip_special_tokens=False) == whole + SENTENCE


@pytest.mark.parametrize("sentence", ["the fox<|im_end|>", "<|im_start|><|im_end|>the<|im_end|><|im_start|>"])
@pytest.mark.parametrize("shown", [False, True])
def test_a_history_is_known_by_what_the_client_got_of_it(
    client: TestClient, engine: FakeEngineClient, sentence: str, shown: bool
) -> None:
    engine.sentence = sentence
    first = chat(client, session_id="s", skip_special_tokens=not shown)
    said = first["choices"][0]["message"]
    assert ("<|im_end|>" in said["content"]) == shown
    known = ids_of(engine)
    assert known[-first["usage"]["completion_tokens"] :] == TOKENIZER.encode(sentence, add_special_tokens=False)
    answer = {"role": said["role"], "content": said["content"]}
    chat(client, session_id="s", messages=[*CHAT["messages"], answer, *NEXT], max_tokens=1)
    assert ids_of(engine)[: len(known) - 1] == known[:-1]
    closing = "<|im_end|>\n<|im_start|>user\na dog<|im_end|>\n<|im_start|>assistant\n"
    assert closing in TOKENIZER.decode(ids_of(engine), skip_special_tokens=False)


def test_an_appended_text_and_appended_ids_follow_as_they_are(client: TestClient, engine: FakeEngineClient) -> None:
    append = {"session": {"append": True}}
    for more in ({}, {"prompt": " and on", **append}, {"prompt": [5, 6], **append}):
        body = {**COMPLETION, "max_tokens": 2, **more}
        response = client.post("/v1/completions", json=body, headers={"X-Session-ID": "s"})
        assert response.status_code == 200, response.text
    said = TOKENIZER.encode(SENTENCE, add_special_tokens=False)[:2]
    first = TOKENIZER.encode("the fox", add_special_tokens=True)
    then = TOKENIZER.encode(" and on", add_special_tokens=False)
    assert ids_of(engine) == [*first, *said, *then, *said, 5, 6, *said]


def test_a_fork_goes_on_by_itself_and_its_first_turn_belongs_to_its_replica(
    client: TestClient, engine: FakeEngineClient
) -> None:
    chat(client, session_id="s")
    tokens = get(client, "/v1/sessions/s")["tokens"]
    named = client.post("/v1/sessions/s/fork", json={"session_id": "a/b"})
    assert (named.json()["id"], named.json()["tokens"], named.status_code) == ("a/b", tokens, 200)
    drawn = client.post("/v1/sessions/s/fork", json={})
    assert len(drawn.json()["id"]) == 32
    assert engine.forks == {("", "public:a/b"): "b", ("", f"public:{drawn.json()['id']}"): "b"}
    chat(client, session={"id": "a/b", "append": True}, messages=NEXT)
    assert get(client, "/v1/sessions/a/b")["turns"] == 2
    assert get(client, "/v1/sessions/s")["turns"] == 1
    assert [get(client, f"/v1/sessions/{name}")["forked_from"] for name in ("s", "a/b")] == [None, "s"]
    again = client.post("/v1/sessions/s/fork", json={"session_id": "a/b"})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "session_id")
    assert client.post("/v1/sessions/nobody/fork", json={}).status_code == 404


class MovingClient(FakeEngineClient):
    """Its sessions leave their replica between being found and being forked, so many times."""

    num_moves = 0

    async def query(self, query: Any, *, replica_id: str | None = None) -> dict[str, Any]:
        if isinstance(query, ForkSession) and self.num_moves:
            self.num_moves -= 1
            raise SessionNotFound("session_id", "s")
        return await super().query(query, replica_id=replica_id)


@pytest.mark.parametrize(("num_moves", "status"), [(1, 200), (3, 200), (10**6, 503)])
def test_a_session_that_moves_while_it_is_forked_is_looked_for_again(num_moves: int, status: int) -> None:
    engine = MovingClient(TOKENIZER)
    client = api(engine)
    chat(client, session_id="s")
    engine.num_moves = num_moves
    response = client.post("/v1/sessions/s/fork", json={"session_id": "t"})
    assert response.status_code == status, response.text
    get(client, "/v1/sessions/t", 200 if status == 200 else 404)
    assert client.post("/v1/sessions/nobody/fork", json={}).status_code == 404


def test_another_key_s_sessions_and_requests_are_unknown() -> None:
    one, two = ({"authorization": f"Bearer {key}"} for key in KEYS["api_keys"])
    client = api(**KEYS)
    answer = chat(client, headers=one, session_id="s")
    get(client, "/v1/sessions/s", headers=one)
    get(client, f"/v1/kv/explain/{answer['id']}", headers=one)
    get(client, "/v1/sessions/s", 404, headers=two)
    get(client, f"/v1/kv/explain/{answer['id']}", 404, headers=two)
    assert client.delete("/v1/sessions/s", headers=two).status_code == 404
    assert client.post("/v1/sessions/s/fork", json={}, headers=two).status_code == 404
    chat(client, 404, headers=two, session={"id": "s", "append": True})
    get(client, "/v1/sessions/s", 401)
    chat(client, headers=two, session_id="s")  # of the same name, and another
    assert get(client, "/v1/sessions/s", headers=two)["turns"] == 1
    assert client.delete("/v1/sessions/s", headers=two).status_code == 200
    get(client, "/v1/sessions/s", headers=one)


def test_a_cache_salt_names_the_session_too(client: TestClient) -> None:
    chat(client, session_id="s", cache_salt="x y")
    get(client, "/v1/sessions/s", 404)
    get(client, "/v1/sessions/s?cache_salt=x%20y")


def test_who_asks_finds_what_its_own_request_found_whatever_salt_that_named(client: TestClient) -> None:
    """As the page does, which knows of ids alone; another ingress needs the salt."""
    answer = chat(client, cache_salt="x y")
    (shown,) = get(client, "/v1/requests")["data"]
    by_id, by_salt = (get(client, f"/v1/kv/explain/{shown['id']}{salt}") for salt in ("", "?cache_salt=x%20y"))
    assert by_id == by_salt
    assert by_id["choices"][0]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_odd_characters_are_names_like_any_other(client: TestClient) -> None:
    for name, path in (
        ("../../etc", "..%2F..%2Fetc"),
        ("世界 🙂?#%", "%E4%B8%96%E7%95%8C%20%F0%9F%99%82%3F%23%25"),
    ):
        chat(client, session_id=name)
        assert get(client, f"/v1/sessions/{path}")["id"] == name
        assert client.delete(f"/v1/sessions/{path}").status_code == 200


def test_a_replica_that_does_not_answer_is_no_proof_that_there_is_no_session(
    client: TestClient, engine: FakeEngineClient
) -> None:
    engine.query_failure = ReplicaUnavailable("a replica did not answer")
    for path in ("/v1/sessions/s", "/v1/kv/explain/x"):
        response = client.get(path)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")


def test_kv_details_sum_to_the_prompt_and_are_explained(client: TestClient) -> None:
    chat(client)
    answer = chat(client, n=2)
    details, num_prompt = answer["usage"]["kv_details"], answer["usage"]["prompt_tokens"]
    assert details == {
        "device": num_prompt - 1, "host": 0, "disk": 0, "peer": 0, "recomputed": 1, "dropped": 0,
        "truncated": 0,
    }  # fmt: skip
    explained = get(client, f"/v1/kv/explain/{answer['id']}")
    assert explained == get(client, f"/v1/kv/explain/{answer['id'].removeprefix('chatcmpl-')}") | {"id": answer["id"]}
    assert [choice["choice"] for choice in explained["choices"]] == [0, 1]
    for choice in explained["choices"]:
        assert choice["kv_details"] == details
        assert choice["ranges"] == [
            {"start": 0, "end": num_prompt - 1, "source": "device"},
            {"start": num_prompt - 1, "end": num_prompt, "source": "recomputed"},
        ]


def test_a_session_s_life_reaches_the_engine(client: TestClient) -> None:
    chat(client, session={"id": "s", "ttl_s": 60})
    assert 50 < get(client, "/v1/sessions/s")["expires_in_s"] <= 60
    chat(client, session={"id": "t", "ttl_s": MAX_TTL_S})
    assert 3590 < get(client, "/v1/sessions/t")["expires_in_s"] <= 3600  # the server's own bound


def test_a_session_deleted_while_it_streams_lets_its_answer_end_and_may_begin_anew() -> None:
    with serving(gate=asyncio.Semaphore(0)) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        body = {**CHAT, "stream": True, "session_id": "s"}
        server.allow_steps(3)
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            path = "/v1/sessions/s"
            found = http.get(path).json()
            assert (found["answering"], found["turns"]) == (True, 0)
            assert [http.delete(path).status_code, http.delete(path).status_code] == [200, 404]
            assert http.get(path).status_code == 404
            assert http.post(f"{path}/fork", json={}).status_code == 404
            server.allow_steps(500)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        server.wait_idle()
        assert http.get(path).status_code == 404
        assert server.call(lambda: len(server.engine.sessions)) == 0
        for session, status in (({"id": "s", "append": True}, 404), ({"id": "s"}, 200)):
            answer = http.post("/v1/chat/completions", json={**CHAT, "session": session})
            assert answer.status_code == status
        assert http.get(path).json()["turns"] == 1


@pytest.mark.parametrize("hint", [{"prompt_cache_key": "app"}, {"X-Correlation-ID": "app"}, {"session-id": "\u00fc"}])
def test_a_hint_holds_up_nobody_and_opens_no_session(hint: dict[str, str]) -> None:
    headers = {} if "prompt_cache_key" in hint else {name: value.encode() for name, value in hint.items()}
    body = {**CHAT, **(hint if not headers else {})}
    with serving(gate=asyncio.Semaphore(0)) as server, ThreadPoolExecutor(32) as threads:

        def ask(_: int) -> int:
            return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code

        answers = [threads.submit(ask, i) for i in range(8)]
        server.wait_running(8)
        assert {request.session_id for request in server.engine.requests} == {None}
        assert len({request.affinity for request in server.engine.requests}) == 1
        assert "app" not in (server.engine.requests[0].affinity or "app")
        server.allow_steps(8 * 100)
        assert {answer.result(60) for answer in answers} == {200}
        assert len(server.engine.sessions) == 0


def test_hints_are_of_one_tenant_and_the_body_s_counts_first(engine: FakeEngineClient) -> None:
    client = api(engine, **KEYS)
    for key in KEYS["api_keys"]:
        for name in ("X-Correlation-ID", "session-id"):
            chat(client, headers={"authorization": f"Bearer {key}", name: "a"})
        both = {"authorization": f"Bearer {key}", "session-id": "b"}
        chat(client, headers=both, prompt_cache_key="a")
        chat(client, headers={"authorization": f"Bearer {key}"})
    hints = [request.affinity for request in engine.requests]
    assert hints[0] is not None
    assert hints[0] == hints[1] == hints[2]
    assert hints[4] == hints[5] == hints[6] != hints[0]
    assert hints[3] is hints[7] is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_waited_and_then_could_not_run_is_refused_as_it_would_have_been_at_once(stream: bool) -> None:
    class Late(FakeEngineClient):
        async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[TokenEvent]:
            refusal = pickle.loads(pickle.dumps(SessionNotFound("session_id", "s")))  # it comes from another process
            yield TokenEvent(requests[0].request_id, (), "error", None, None, str(refusal), refusal)

    body = {**CHAT, "stream": stream, "session": {"id": "s", "append": True}}
    response = post("/v1/chat/completions", body, engine=Late(TOKENIZER))
    assert (response.status_code, response.json()["error"]["code"]) == (404, "session_not_found")
    assert response.json()["error"]["param"] == "session_id"


def test_a_fork_for_which_there_is_no_room_is_refused() -> None:
    engine = FakeEngineClient(TOKENIZER, max_session_tokens=60)  # of one such session, and not of two
    client = api(engine)
    chat(client, session_id="s")
    sampling = SamplingParams()
    engine.sessions.begin(  # it answers, so it is not the one that goes
        GenerationRequest(request_id="x.0", prompt_token_ids=(5,), sampling=sampling, session_id="public:s")
    )
    assert 30 < engine.sessions.num_tokens < 60
    response = client.post("/v1/sessions/s/fork", json={})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
    assert len(engine.sessions) == 1
