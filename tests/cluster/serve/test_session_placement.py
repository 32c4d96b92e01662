"""What reaches the replica that holds a session: appended turns, first turns of forks, questions."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mneme.cluster.serve import ray_client as ray_engine_client
from mneme.cluster.serve.engine_client import newest
from mneme.cluster.serve.ray_client import RayEngineClient
from mneme.errors import ReplicaUnavailable, SessionNotFound
from mneme.replicas.queries import DeleteSession, GetSession, LeaveSession
from mneme.replicas.request import GenerationRequest
from tests.cluster.serve.scenarios import all_open, over, request, run, tokens, until
from tests.fakes.direct_calls import DirectCalls

KEY = ("", "s")


def appended(request_id: str) -> GenerationRequest:
    return replace(request(request_id, session_id="s"), append=True)


def admitted(calls: DirectCalls) -> dict[str, list[str]]:
    return {name: [r.request_id for r in engine.admitted] for name, engine in calls.engines.items()}


@pytest.mark.parametrize("holder", ["a", "b"])
@over(run)
async def test_what_is_appended_runs_where_the_session_is(
    calls: DirectCalls, client: RayEngineClient, *, holder: str
) -> None:
    await all_open(client)
    calls.engines[holder].sessions[KEY] = 5.0
    await tokens(client, appended("one.0"))
    (other,) = {"a", "b"} - {holder}
    calls.engines[other].sessions[KEY] = 7.0  # an older copy
    await tokens(client, appended("two.0"))
    assert admitted(calls) == {holder: ["one.0", "two.0"], other: []}


@over(run)
async def test_nothing_is_appended_to_a_session_that_no_replica_has(
    calls: DirectCalls, client: RayEngineClient
) -> None:
    with pytest.raises(SessionNotFound) as refusal:
        await tokens(client, replace(appended("one.0"), session_id="public:s"))
    assert "'s'" in str(refusal.value)
    assert admitted(calls) == {"a": [], "b": []}


@over(run)
async def test_a_session_that_no_replica_knows_is_appended_to_where_its_log_can_be_read(
    calls: DirectCalls, client: RayEngineClient
) -> None:
    for engine in calls.engines.values():
        engine.durable.add(KEY)
    assert len(await tokens(client, appended("one.0"))) > 0
    assert sorted(map(len, admitted(calls).values())) == [0, 1]


@over(run)
async def test_a_replica_that_died_with_a_session_is_not_waited_for_where_there_are_logs(
    calls: DirectCalls, client: RayEngineClient
) -> None:
    await all_open(client)
    calls.engines["a"].sessions[KEY] = 1.0
    calls.engines["b"].durable.add(KEY)
    calls.kill("a")
    with pytest.raises(ReplicaUnavailable):  # only it may know what was said
        await tokens(client, appended("one.0"))
    client.has_session_logs = True
    await tokens(client, appended("two.0"))
    assert admitted(calls) == {"a": [], "b": ["two.0"]}


def test_the_newest_copy_counts_whichever_was_used_last() -> None:
    answers = {"a": {"version": 7, "idle_s": 100.0}, "b": {"version": 6, "idle_s": 1.0}, "c": None}
    assert newest(answers) == ("a", answers["a"])
    assert newest({"c": None}) is None


@over(run)
async def test_a_replica_that_hangs_is_an_error_in_time(
    calls: DirectCalls, client: RayEngineClient, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine_client, "QUERY_TIMEOUT_S", 0.05)
    calls.hang_queries = True
    with pytest.raises(ReplicaUnavailable):
        await client.query(GetSession(KEY))
    with pytest.raises(ReplicaUnavailable):
        await tokens(client, appended("one.0"))


@pytest.mark.parametrize("num_refusals", [3, 10**9])
@over(run)
async def test_a_log_that_cannot_be_read_yet_is_waited_for(
    calls: DirectCalls, client: RayEngineClient, *, num_refusals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine_client, "QUERY_TIMEOUT_S", 0.5)
    monkeypatch.setattr(ray_engine_client, "_PAUSE_S", 0.001)
    engine = calls.engines["a"]
    engine.sessions[KEY] = 1.0
    engine.refusals = [ReplicaUnavailable("the session's log cannot be read now")] * min(num_refusals, 10**5)
    asked = client.query(GetSession(KEY), replica_id="a")
    if num_refusals == 3:
        assert (await asked)["a"]["idle_s"] == 1.0
    else:
        with pytest.raises(ReplicaUnavailable, match="log cannot be read now"):
            await asked


@over(run)
async def test_a_question_waits_for_the_first_replica(calls: DirectCalls, client: RayEngineClient) -> None:
    client.set_replicas(())
    asked = asyncio.ensure_future(client.query(GetSession(KEY)))
    await asyncio.sleep(0)
    client.set_replicas(("b",))
    assert await asked == {"b": None}


@over(run)
async def test_questions_reach_every_replica_and_none_that_is_gone(calls: DirectCalls, client: RayEngineClient) -> None:
    calls.engines["b"].sessions[KEY] = 1.0
    assert await client.query(GetSession(KEY)) == {"a": None, "b": {"version": 0, "idle_s": 1.0}}
    assert await client.query(DeleteSession(KEY)) == {"a": False, "b": True}
    assert await client.query(GetSession(KEY), replica_id="b") == {"b": None}
    calls.kill("a")
    with pytest.raises(ReplicaUnavailable):  # it may have had the session
        await client.query(GetSession(KEY))
    client.set_replicas(("b",))
    assert await client.query(GetSession(KEY)) == {"b": None}
    with pytest.raises(ReplicaUnavailable):
        await client.query(GetSession(KEY), replica_id="a")


@pytest.mark.parametrize("home", ["a", "b"])
@over(run)
async def test_a_fork_s_first_turn_runs_where_it_was_made(
    calls: DirectCalls, client: RayEngineClient, *, home: str
) -> None:
    await all_open(client)
    for index in range(4):
        client.place_fork(("", f"f{index}"), home)
        await tokens(client, request(f"{index}.0", session_id=f"f{index}"))
    assert len(admitted(calls)[home]) == 4


@over(run)
async def test_a_session_that_moves_leaves_nothing_behind(calls: DirectCalls, client: RayEngineClient) -> None:
    await all_open(client)
    await tokens(client, request("one.0", session_id="s"))
    (home,) = [name for name, ids in admitted(calls).items() if ids]
    (other,) = {"a", "b"} - {home}
    calls.engines[home].sessions[KEY] = 1.0
    for _ in range(40):  # as busy as it can be
        client.chooser.select_and_reserve([1], exclude=[other])
    await tokens(client, request("two.0", session_id="s"))
    assert admitted(calls)[other] == ["two.0"]
    await until(lambda: not calls.engines[home].sessions)
    assert calls.engines[home].queries == [LeaveSession(KEY)]  # its durable log stays
    assert not calls.engines[other].queries


@pytest.mark.parametrize("holder", ["a", "b"])
@over(run)
async def test_a_request_goes_where_its_prefix_was_warmed(
    calls: DirectCalls, client: RayEngineClient, *, holder: str
) -> None:
    await all_open(client)
    ids = tuple(range(200))
    client.record_prefix(ids, holder, salt="x")
    await tokens(client, replace(request("one.0"), prompt_token_ids=(*ids, 7), salt="x"))
    assert admitted(calls)[holder] == ["one.0"]
