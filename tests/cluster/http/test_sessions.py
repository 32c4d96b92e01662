"""Sessions, appended turns, forks and explanations, as an HTTP client meets them."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mneme.cluster.config import HttpConfig
from mneme.cluster.http.protocol import MAX_TTL_S
from mneme.errors import ReplicaUnavailable, SessionNotFound
from mneme.replicas.request import GenerationRequest, SamplingParams, TokenEvent
from tests.cluster.api_fixtures import CHAT, COMPLETION, RENDERED, TOKENIZER, api_client, post, serving
from tests.cluster.fake_engine_client import SENTENCE, FakeEngineClient

Scenario = Callable[[httpx.AsyncClient, FakeEngineClient], Awaitable[None]]
NEXT = [{"role": "user", "content": "a dog"}]
KEYS = {"api_keys": ["key-one-1234567890", "key-two-1234567890"]}


def run(scenario: Scenario, **config: Any) -> FakeEngineClient:
    async def main() -> FakeEngineClient:
        engine = FakeEngineClient(TOKENIZER)
        async with api_client(engine, **config) as client:
            await scenario(client, engine)
        return engine

    return asyncio.run(main())


async def chat(client: httpx.AsyncClient, status: int = 200, headers: Any = None, **changes: Any) -> Any:
    response = await client.post("/v1/chat/completions", json={**CHAT, **changes}, headers=headers)
    assert response.status_code == status, response.text
    return response.json()


async def get(client: httpx.AsyncClient, path: str, status: int = 200, headers: Any = None) -> Any:
    response = await client.get(path, headers=headers)
    assert response.status_code == status, response.text
    return response.json()


def test_a_session_from_its_first_turn_to_its_end() -> None:
    async def scenario(client: httpx.AsyncClient, engine: FakeEngineClient) -> None:
        assert (await get(client, "/v1/sessions/s", 404))["error"]["code"] == "session_not_found"
        usage = (await chat(client, session_id="s"))["usage"]
        found = await get(client, "/v1/sessions/s")
        assert (found["id"], found["object"], found["replica"], found["turns"]) == ("s", "session", "b", 1)
        assert found["tokens"] == usage["total_tokens"] == sum(found["kv"].values())
        assert found["answering"] is False
        assert 3590 < found["expires_in_s"] <= 3600
        deleted = await client.delete("/v1/sessions/s")
        assert deleted.json() == {"id": "s", "object": "session.deleted", "deleted": True}
        assert (await client.delete("/v1/sessions/s")).status_code == 404
        await get(client, "/v1/sessions/s", 404)

    run(scenario)


def test_an_appended_turn_runs_what_the_whole_conversation_would() -> None:
    async def scenario(client: httpx.AsyncClient, engine: FakeEngineClient) -> None:
        first = await chat(client, session_id="s", max_tokens=9)
        answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        await chat(client, session={"id": "s", "append": True}, messages=NEXT)
        (whole,) = [
            TOKENIZER.render_chat([*CHAT["messages"], answer, *NEXT]),
        ]
        log = engine.sessions.get(("", "public:s"))
        assert log is not None
        assert TOKENIZER.decode(log.ids.tolist(), skip_special_tokens=False) == whole + SENTENCE

    run(scenario)


@pytest.mark.parametrize(
    "sentence",
    [
        "the fox<|im_end|> jumps",
        "the fox<|im_end|>",
        "<|im_start|><|im_end|>the<|im_end|><|im_start|>",
        "<|im_end|>" * 3,
    ],
)
@pytest.mark.parametrize("shown", [False, True])
def test_a_history_is_known_by_what_the_client_got_of_it(sentence: str, shown: bool) -> None:
    async def scenario(client: httpx.AsyncClient, engine: FakeEngineClient) -> None:
        engine.sentence = sentence
        first = await chat(client, session_id="s", skip_special_tokens=not shown)
        said = first["choices"][0]["message"]
        assert ("<|im_end|>" in said["content"]) == shown
        log = engine.sessions.get(("", "public:s"))
        assert log is not None
        known = log.ids.tolist()
        assert known[-first["usage"]["completion_tokens"] :] == TOKENIZER.encode(sentence, add_special_tokens=False)
        answer = {"role": said["role"], "content": said["content"]}
        await chat(client, session_id="s", messages=[*CHAT["messages"], answer, *NEXT], max_tokens=1)
        assert log.ids.tolist()[: len(known) - 1] == known[:-1]
        closing = "<|im_end|>\n<|im_start|>user\na dog<|im_end|>\n<|im_start|>assistant\n"
        assert closing in TOKENIZER.decode(log.ids.tolist(), skip_special_tokens=False)

    run(scenario)


def test_an_appended_text_and_appended_ids_follow_as_they_are() -> None:
    async def scenario(client: httpx.AsyncClient, engine: FakeEngineClient) -> None:
        for body in (
            {},
            {"prompt": " and on", "session": {"append": True}},
            {"prompt": [5, 6], "session": {"append": True}},
        ):
            response = await client.post(
                "/v1/completions", json={**COMPLETION, "max_tokens": 2, **body}, headers={"X-Session-ID": "s"}
            )
            assert response.status_code == 200, response.text
        log = engine.sessions.get(("", "public:s"))
        assert log is not None
        said = TOKENIZER.encode(SENTENCE, add_special_tokens=False)[:2]
        first = TOKENIZER.encode("the fox", add_special_tokens=True)
        then = TOKENIZER.encode(" and on", add_special_tokens=False)
        assert log.ids.tolist() == [*first, *said, *then, *said, 5, 6, *said]

    run(scenario)


def test_every_choice_of_an_appended_turn_has_the_history() -> None:
    async def scenario(client: httpx.AsyncClient, engine: FakeEngineClient) -> None:
        first = (await chat(client, session_id="s"))["usage"]["total_tokens"]
        answer = await chat(client, session={"id": "s", "append": True}, messages=NEXT, n=2)
        assert answer["usage"]["prompt_tokens"] > first
        assert [choice["message"]["content"] for choice in answer["choices"]] == [SENTENCE, SENTENCE]

    run(scenario)


def test_a_fork_goes_on_by_itself_and_its_first_turn_belongs_to_its_replica() -> None:
    async def scenario(client: httpx.AsyncClient, engine: FakeEngineClient) -> None:
        await chat(client, session_id="s")
        tokens = (await get(client, "/v1/sessions/s"))["tokens"]
        named = await client.post("/v1/sessions/s/fork", json={"session_id": "a/b"})
        assert (named.json()["id"], named.json()["tokens"], named.status_code) == ("a/b", tokens, 200)
        drawn = await client.post("/v1/sessions/s/fork", json={})
        assert len(drawn.json()["id"]) == 32
        assert engine.forks == {("", "public:a/b"): "b", ("", f"public:{drawn.json()['id']}"): "b"}
        await chat(client, session={"id": "a/b", "append": True}, messages=NEXT)
        assert (await get(client, "/v1/sessions/a/b"))["turns"] == 2
        assert (await get(client, "/v1/sessions/s"))["turns"] == 1
        again = await client.post("/v1/sessions/s/fork", json={"session_id": "a/b"})
        assert (again.status_code, again.json()["error"]["param"]) == (400, "session_id")
        assert (await client.post("/v1/sessions/nobody/fork", json={})).status_code == 404

    run(scenario)


class MovingClient(FakeEngineClient):
    """Its sessions leave their replica between being found and being forked, so many times."""

    num_moves = 0

    async def query(self, query: Any, *, replica_id: str | None = None) -> dict[str, Any]:
        if query.name == "fork_session" and self.num_moves:
            self.num_moves -= 1
            raise SessionNotFound("session_id", "s")
        return await super().query(query, replica_id=replica_id)


@pytest.mark.parametrize(("num_moves", "status"), [(1, 200), (3, 200), (10**6, 503)])
def test_a_session_that_moves_while_it_is_forked_is_looked_for_again(num_moves: int, status: int) -> None:
    async def main() -> None:
        engine = MovingClient(TOKENIZER)
        async with api_client(engine) as client:
            await chat(client, session_id="s")
            engine.num_moves = num_moves
            response = await client.post("/v1/sessions/s/fork", json={"session_id": "t"})
            assert response.status_code == status, response.text
            await get(client, "/v1/sessions/t", 200 if status == 200 else 404)
            assert (await client.post("/v1/sessions/nobody/fork", json={})).status_code == 404

    asyncio.run(main())


def test_another_key_s_sessions_and_requests_are_unknown() -> None:
    one, two = ({"authorization": f"Bearer {key}"} for key in KEYS["api_keys"])

    async def scenario(client: httpx.AsyncClient, engine: FakeEngineClient) -> None:
        answer = await chat(client, headers=one, session_id="s")
        await get(client, "/v1/sessions/s", headers=one)
        await get(client, f"/v1/kv/explain/{answer['id']}", headers=one)
        await get(client, "/v1/sessions/s", 404, headers=two)
        await get(client, f"/v1/kv/explain/{answer['id']}", 404, headers=two)
        assert (await client.delete("/v1/sessions/s", headers=two)).status_code == 404
        assert (await client.post("/v1/sessions/s/fork", json={}, headers=two)).status_code == 404
        await chat(client, 404, headers=two, session={"id": "s", "append": True})
        await get(client, "/v1/sessions/s", 401)

    run(scenario, **KEYS)


def test_a_cache_salt_names_the_session_too() -> None:
    async def scenario(client: httpx.AsyncClient, engine: FakeEngineClient) -> None:
        answer = await chat(client, session_id="s", cache_salt="x y")
        await get(client, "/v1/sessions/s", 404)
        await get(client, "/v1/sessions/s?cache_salt=x%20y")
        await get(client, f"/v1/kv/explain/{answer['id']}", 404)
        await get(client, f"/v1/kv/explain/{answer['id']}?cache_salt=x%20y")

    run(scenario)


def test_odd_characters_are_names_like_any_other() -> None:
    async def scenario(client: httpx.AsyncClient, engine: FakeEngineClient) -> None:
        for name, path in (
            ("../../etc", "..%2F..%2Fetc"),
            ("世界 🙂?#%", "%E4%B8%96%E7%95%8C%20%F0%9F%99%82%3F%23%25"),
        ):
            await chat(client, session_id=name)
            assert (await get(client, f"/v1/sessions/{path}"))["id"] == name
            assert (await client.delete(f"/v1/sessions/{path}")).status_code == 200

    run(scenario)


def test_a_replica_that_does_not_answer_is_no_proof_that_there_is_no_session() -> None:
    async def scenario(client: httpx.AsyncClient, engine: FakeEngineClient) -> None:
        engine.query_failure = ReplicaUnavailable("a replica did not answer")
        for path in ("/v1/sessions/s", "/v1/kv/explain/x"):
            response = await client.get(path)
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")

    run(scenario)


def test_kv_details_sum_to_the_prompt_and_are_explained() -> None:
    async def scenario(client: httpx.AsyncClient, engine: FakeEngineClient) -> None:
        await chat(client)
        answer = await chat(client, n=2)
        details, num_prompt = answer["usage"]["kv_details"], answer["usage"]["prompt_tokens"]
        assert details == {
            "device": num_prompt - 1, "host": 0, "disk": 0, "peer": 0, "recomputed": 1, "dropped": 0,
            "truncated": 0,
        }  # fmt: skip
        explained = await get(client, f"/v1/kv/explain/{answer['id']}")
        assert explained == await get(client, f"/v1/kv/explain/{answer['id'].removeprefix('chatcmpl-')}") | {
            "id": answer["id"]
        }
        assert [choice["choice"] for choice in explained["choices"]] == [0, 1]
        for choice in explained["choices"]:
            assert choice["kv_details"] == details
            assert choice["ranges"] == [
                {"start": 0, "end": num_prompt - 1, "source": "device"},
                {"start": num_prompt - 1, "end": num_prompt, "source": "recomputed"},
            ]

    run(scenario)


def test_a_stream_s_usage_has_them_too() -> None:
    async def scenario(client: httpx.AsyncClient, engine: FakeEngineClient) -> None:
        body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        text = (await client.post("/v1/chat/completions", json=body)).text
        assert '"kv_details":{"device":0,' in text

    run(scenario)


def test_a_session_s_life_reaches_the_engine() -> None:
    async def scenario(client: httpx.AsyncClient, engine: FakeEngineClient) -> None:
        await chat(client, session={"id": "s", "ttl_s": 60})
        assert 50 < (await get(client, "/v1/sessions/s"))["expires_in_s"] <= 60
        await chat(client, session={"id": "t", "ttl_s": MAX_TTL_S})
        assert 3590 < (await get(client, "/v1/sessions/t"))["expires_in_s"] <= 3600  # the server's own bound

    run(scenario)


def test_a_session_deleted_while_it_streams_lets_its_answer_end() -> None:
    with serving(gate=asyncio.Semaphore(0)) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        body = {**CHAT, "stream": True, "session_id": "s"}
        server.allow_steps(3)
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            found = httpx.get(f"{server.url}/v1/sessions/s").json()
            assert (found["answering"], found["turns"]) == (True, 0)
            assert httpx.delete(f"{server.url}/v1/sessions/s").status_code == 200
            assert httpx.get(f"{server.url}/v1/sessions/s").status_code == 404
            server.allow_steps(500)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        server.wait_idle()
        assert httpx.get(f"{server.url}/v1/sessions/s").status_code == 404
        assert server.call(lambda: len(server.engine.sessions)) == 0


def test_what_is_rendered_for_an_appended_turn_begins_behind_the_answer() -> None:
    async def scenario(client: httpx.AsyncClient, engine: FakeEngineClient) -> None:
        await chat(client, session_id="s")
        await chat(client, session={"id": "s", "append": True})
        first, second = engine.requests
        assert (first.prompt_text, first.append, first.num_closing_chars) == (RENDERED, False, 0)
        assert second.prompt_text == "<|im_end|>\n" + RENDERED
        assert second.num_closing_chars == len("<|im_end|>\n")

    run(scenario)


@pytest.mark.parametrize("name", ["X-Session-ID", "session", "session_id"])
def test_the_first_name_given_counts(name: str) -> None:
    order = ["X-Session-ID", "session", "session_id"]
    fields: dict[str, Any] = {key: key for key in order[order.index(name) :]}
    headers = {"X-Session-ID": fields.pop("X-Session-ID")} if "X-Session-ID" in fields else {}
    if "session" in fields:
        fields["session"] = {"id": "session"}

    async def scenario(client: httpx.AsyncClient, engine: FakeEngineClient) -> None:
        await chat(client, headers=headers, prompt_cache_key="hint", **fields)
        assert engine.requests[0].session_id == f"public:{name}"

    run(scenario)


@pytest.mark.parametrize("hint", [{"prompt_cache_key": "app"}, {"X-Correlation-ID": "app"}, {"x-hint": "\u00fc"}])
def test_a_hint_holds_up_nobody_and_opens_no_session(hint: dict[str, str]) -> None:
    config = HttpConfig(affinity_headers=("X-Correlation-ID", "X-Hint"))
    headers = {} if "prompt_cache_key" in hint else {name: value.encode() for name, value in hint.items()}
    body = {**CHAT, **(hint if not headers else {})}
    with serving(config=config, gate=asyncio.Semaphore(0)) as server, ThreadPoolExecutor(32) as threads:

        def ask(_: int) -> int:
            return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code

        answers = [threads.submit(ask, i) for i in range(32)]
        server.wait_running(32)
        assert {request.session_id for request in server.engine.requests} == {None}
        assert len({request.affinity for request in server.engine.requests}) == 1
        assert "app" not in (server.engine.requests[0].affinity or "app")
        server.allow_steps(32 * 100)
        assert {answer.result(60) for answer in answers} == {200}
        assert len(server.engine.sessions) == 0


def test_hints_are_of_one_tenant_and_the_body_s_counts_first() -> None:
    async def scenario(client: httpx.AsyncClient, engine: FakeEngineClient) -> None:
        for key in KEYS["api_keys"]:
            for name in ("X-Correlation-ID", "session-id"):
                await chat(client, headers={"authorization": f"Bearer {key}", name: "a"})
            both = {"authorization": f"Bearer {key}", "session-id": "b"}
            await chat(client, headers=both, prompt_cache_key="a")
            await chat(client, headers={"authorization": f"Bearer {key}"})
        hints = [request.affinity for request in engine.requests]
        assert hints[0] is not None
        assert hints[0] == hints[1] == hints[2]
        assert hints[4] == hints[5] == hints[6] != hints[0]
        assert hints[3] is hints[7] is None

    run(scenario, **KEYS)


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
    async def scenario(client: httpx.AsyncClient, engine: FakeEngineClient) -> None:
        await chat(client, session_id="s")
        engine.sessions.begin(
            GenerationRequest(  # it answers, so it is not the one that goes
                request_id="x.0", prompt_token_ids=(5,), sampling=SamplingParams(), session_id="public:s"
            )
        )
        engine.sessions._max_tokens = 0
        response = await client.post("/v1/sessions/s/fork", json={})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
        assert len(engine.sessions) == 1

    run(scenario)
