"""The ingress's side of the token stream against replicas in this process, with every kind of loss."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from mneme.cluster.serve import link as replica_link
from mneme.cluster.serve import ray_client as ray_engine_client
from mneme.cluster.serve.calls import WrongReplica
from mneme.cluster.serve.engine_client import Condition
from mneme.cluster.serve.ray_client import RayEngineClient
from mneme.cluster.serve.replica import ReplicaServer
from mneme.errors import InvalidRequest, Overloaded, ReplicaUnavailable
from mneme.replicas.queries import FlushSaves
from mneme.replicas.report import ReplicaReport
from mneme.replicas.request import WARM_UP_SALT, GenerationRequest, SamplingParams
from tests.cluster.serve.scenarios import ENDLESS, all_open, expected, over, request, run, running, tokens, until
from tests.fakes.direct_calls import DirectCalls
from tests.fakes.fake_engine import FakeEngineLoop


@over(run)
async def test_streams_tokens_in_order_with_usage_once(calls: DirectCalls, client: RayEngineClient) -> None:
    asked = request()
    events = [event async for event in client.generate([asked])]
    assert [i for event in events for i in event.token_ids] == expected(asked)
    assert [event.usage is not None for event in events] == [True] + [False] * (len(events) - 1)
    assert [event.finish_reason for event in events][-1] == "length"


@over(run, warm_up=replace(request(num=2), salt=WARM_UP_SALT))
async def test_a_replica_gets_requests_once_others_have_warmed_it(calls: DirectCalls, client: RayEngineClient) -> None:
    assert (await tokens(client, request()))[0] == expected(request())
    await until(lambda: client.num_ready() == 2)
    await tokens(client, request("again.0"))
    for engine in calls.engines.values():
        salts = [each.salt for each in engine.admitted]
        assert salts == sorted(salts, reverse=True)  # those of warming up first
        assert salts.count(WARM_UP_SALT) > 1


@over(run, replicas=("a",), warm_up=replace(request(num=2), salt=WARM_UP_SALT))
async def test_a_new_replica_has_what_prompts_share_before_it_gets_requests(
    calls: DirectCalls, client: RayEngineClient
) -> None:
    def asked(number: int) -> GenerationRequest:
        return replace(request(f"r{number}.0", num=2), prompt_token_ids=(*range(100), number), salt="tenant")

    for number in range(3):
        await tokens(client, asked(number))
    calls.add("b")
    client.set_replicas(("a", "b"))
    await all_open(client)
    first = [each for each in calls.engines["b"].admitted if each.salt == "tenant"]
    assert [each.prompt_token_ids for each in first] == [tuple(range(100))]
    calls.add("alone")
    client.set_replicas(("alone",))  # requests wait for it
    await all_open(client)
    assert not [each for each in calls.engines["alone"].admitted if each.salt == "tenant"]


@pytest.mark.parametrize("fault", ["refused", "endless", "lost"])
def test_a_replica_that_cannot_be_warmed_gets_requests_all_the_same(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_link, "_WARM_UP_S", 0.1)
    asked = request(num=ENDLESS if fault == "endless" else 20)
    warm_up = replace(asked, prompt_token_ids=() if fault == "refused" else asked.prompt_token_ids)

    async def scenario(calls: DirectCalls, client: RayEngineClient) -> None:
        if fault == "lost":
            await until(lambda: running(calls) == 1)
            calls.drop_next_message("a")
        assert (await tokens(client, request("r.1")))[0] == expected(request("r.1"))
        await until(lambda: running(calls) == 0)

    run(scenario, replicas=("a",), step_s=0.005, warm_up=warm_up)


@over(run)
async def test_many_at_once_use_both_replicas_and_few_submits(calls: DirectCalls, client: RayEngineClient) -> None:
    asked = [request(f"r{i}.0") for i in range(64)]
    answers = await asyncio.gather(*(tokens(client, each) for each in asked))
    assert [ids for ids, _ in answers] == [expected(each) for each in asked]
    assert len(calls.submit_batches) <= 16  # 64 requests: all but the first few shared a call


@over(run)
async def test_choices_of_one_request_run_on_one_replica(calls: DirectCalls, client: RayEngineClient) -> None:
    asked = [request(f"r.{i}", num=4) for i in range(3)]
    got: dict[str, list[int]] = {}
    async for event in client.generate(asked):
        got.setdefault(event.request_id, []).extend(event.token_ids)
    assert got == {each.request_id: expected(each) for each in asked}
    assert calls.submit_batches == [3]


@pytest.mark.parametrize("is_removed_first", [False, True])
@over(run, replicas=("a",), step_s=0.005)
async def test_a_replica_that_drains_ends_short_streams_and_hands_the_others_over(
    calls: DirectCalls, client: RayEngineClient, *, is_removed_first: bool
) -> None:
    asked = [request("short.0", num=30), request("long.0", num=600)]
    work = [asyncio.ensure_future(tokens(client, each)) for each in asked]
    await until(lambda: running(calls) == 2)
    calls.add("b")
    if is_removed_first:
        client.set_replicas(("b",))
    draining = asyncio.ensure_future(calls.drain("a", grace_s=1.0))
    client.set_replicas(("b",))
    assert (await tokens(client, request("new.0")))[0] == expected(request("new.0"))
    answers = await asyncio.gather(*work)
    assert [ids for ids, _ in answers] == [expected(each) for each in asked]
    assert all(last.finish_reason == "length" for _, last in answers)
    assert [each.request_id for each in calls.engines["b"].admitted] == ["new.0", "long~1.0"]
    await draining


@over(run)
async def test_a_replica_that_drains_refuses_before_the_router_knows_and_after(
    calls: DirectCalls, client: RayEngineClient
) -> None:
    await all_open(client)
    left = client.generate([request("left.0", num=ENDLESS)])
    await anext(left)
    (home,) = [r for r, engine in calls.engines.items() if engine.admitted]
    draining = asyncio.ensure_future(calls.drain(home, grace_s=60))
    asked = [request(f"r{i}.0") for i in range(8)]
    answers = await asyncio.gather(*(tokens(client, each) for each in asked))
    assert [ids for ids, _ in answers] == [expected(each) for each in asked]
    assert len(calls.engines[home].admitted) == 1
    client.set_replicas({"a", "b"} - {home})
    await left.aclose()  # an abort cannot reach it: the stream's end says so
    await draining


@pytest.mark.parametrize("fault", ["dies", "hangs"])
@over(run, replicas=("a",), step_s=0.02)
async def test_a_replica_that_goes_while_it_drains_is_a_pause(
    calls: DirectCalls, client: RayEngineClient, *, fault: str
) -> None:
    asked = request(num=60)
    work = asyncio.ensure_future(tokens(client, asked))
    await until(lambda: running(calls) == 1)
    draining = asyncio.ensure_future(calls.drain("a", grace_s=0.5))
    await asyncio.sleep(0.01)
    calls.add("b")
    client.set_replicas(("b",))
    if fault == "dies":
        calls.kill("a")
    else:
        calls.engines["a"].stop()
    assert (await work)[0] == expected(asked)
    await draining


@over(run, replicas=("a",))
async def test_the_only_replica_dies_and_nobody_hangs(
    calls: DirectCalls, client: RayEngineClient, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine_client, "WAIT_FOR_REPLICA_S", 0.2)
    work = asyncio.ensure_future(tokens(client, request(num=500)))
    await until(lambda: running(calls) == 1)
    calls.kill("a")
    ids, last = await work
    assert last.finish_reason == "error"
    assert last.error
    assert ids == expected(request(num=500))[: len(ids)]
    with pytest.raises(ReplicaUnavailable):
        await tokens(client, request("later.0"))
    assert not client.num_ready()


@over(run, step_s=0.005)
async def test_where_all_are_lost_who_asks_is_told_to_come_again_and_who_has_begun_waits(
    calls: DirectCalls, client: RayEngineClient, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine_client, "NO_REPLICA_S", 0.1)
    asked = request(num=100)
    begun = asyncio.ensure_future(tokens(client, asked))
    await until(lambda: running(calls) == 1)
    calls.kill("a")
    calls.kill("b")
    await until(lambda: not client.num_ready())
    with pytest.raises(ReplicaUnavailable) as refusal:
        await tokens(client, request("new.0"))
    assert refusal.value.retry_after_s > 0
    calls.add("c")
    client.set_replicas(("c",))
    assert (await tokens(client, request("again.0")))[0] == expected(request("again.0"))
    assert (await begun)[0] == expected(asked)


@over(run, replicas=())
async def test_a_request_waits_for_a_replica_that_is_on_its_way(
    calls: DirectCalls, client: RayEngineClient, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine_client, "NO_REPLICA_S", 0.0)
    first = asyncio.ensure_future(tokens(client, request("first.0")))
    await asyncio.sleep(0.05)
    calls.add("a")
    client.set_replicas(("a",))
    assert (await first)[0] == expected(request("first.0"))
    draining = asyncio.ensure_future(calls.drain("a", grace_s=60))
    await until(lambda: not client.num_ready())
    second = asyncio.ensure_future(tokens(client, request("second.0")))
    await asyncio.sleep(0.05)
    calls.add("b")
    client.set_replicas(("b",))
    assert (await second)[0] == expected(request("second.0"))
    await draining


@over(run, replicas=(), starts_from_zero=True)
async def test_where_there_is_none_one_is_asked_for_once_and_waited_for(
    calls: DirectCalls, client: RayEngineClient, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes to load, and not as long as a lost replica is waited for."""
    monkeypatch.setattr(ray_engine_client, "WAIT_FOR_REPLICA_S", 0.0)
    asked = [request(f"r{i}.0") for i in range(4)]
    work = asyncio.gather(*(tokens(client, each) for each in asked))
    await until(lambda: calls.num_wakes > 0)
    await asyncio.sleep(0.05)  # longer than a lost replica would be waited for
    calls.add("a")
    client.set_replicas(("a",))
    assert [ids for ids, _ in await work] == [expected(each) for each in asked]
    assert calls.num_wakes == 1


@pytest.mark.parametrize("is_answered", [True, False])
@over(run, replicas=("a",), step_s=0.01, starts_from_zero=True)
async def test_one_is_asked_for_where_the_last_one_goes(
    calls: DirectCalls, client: RayEngineClient, *, is_answered: bool
) -> None:
    """Scaled to zero as a request comes: before Serve says that it is gone, as a stream and as a request that waits."""
    await all_open(client)
    asked, work = request(num=100), None
    if is_answered:
        work = asyncio.ensure_future(tokens(client, asked))
        await until(lambda: running(calls) == 1)
    draining = asyncio.ensure_future(calls.drain("a", grace_s=0.0))
    await until(lambda: not client.num_ready())
    work = work or asyncio.ensure_future(tokens(client, asked))
    await asyncio.sleep(0.05)
    client.set_replicas(())
    await until(lambda: calls.num_wakes > 0)
    calls.add("b")
    client.set_replicas(("b",))
    assert (await work)[0] == expected(asked)
    await draining


@over(run, replicas=("a",), step_s=0.003)
async def test_a_lost_message_is_noticed_and_made_good(calls: DirectCalls, client: RayEngineClient) -> None:
    asked = request(num=60)
    work = asyncio.ensure_future(tokens(client, asked))
    await until(lambda: running(calls) == 1)
    calls.drop_next_message("a")
    ids, _ = await work
    assert ids == expected(asked)
    assert running(calls) == 0


@pytest.mark.parametrize("replicas", [("a", "b"), ("a",)], ids=["elsewhere", "to the same once it answers"])
def test_a_submit_that_hangs_goes_on(monkeypatch: pytest.MonkeyPatch, replicas: tuple[str, ...]) -> None:
    """One that is late is not lost: it is waited for."""
    monkeypatch.setattr(replica_link, "CALL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(ray_engine_client, "NO_REPLICA_S", 0.0)

    async def scenario(calls: DirectCalls, client: RayEngineClient) -> None:
        await until(client.num_ready)
        calls.hang_submits = True
        work = asyncio.ensure_future(tokens(client, request()))
        await until(lambda: bool(calls.submit_batches))
        calls.hang_submits = False
        ids, _ = await work
        assert ids == expected(request())

    run(scenario, replicas=replicas)


@over(run, replicas=("a",))
async def test_a_replica_that_is_removed_while_it_is_asked_is_a_pause(
    calls: DirectCalls, client: RayEngineClient
) -> None:
    await all_open(client)
    calls.hang_submits = True
    work = asyncio.ensure_future(tokens(client, request()))
    await until(lambda: bool(calls.submit_batches))
    calls.hang_submits = False
    calls.add("c")
    client.set_replicas(("c",))
    ids, _ = await work
    assert ids == expected(request())


@over(run)
async def test_cancelling_at_any_moment_aborts(calls: DirectCalls, client: RayEngineClient) -> None:
    await until(client.num_ready)
    for i in range(60):
        work = asyncio.ensure_future(tokens(client, request(f"r{i}.0", num=ENDLESS)))
        for _ in range(i):
            await asyncio.sleep(0)
        await asyncio.sleep(0 if i % 2 else 0.003)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    await until(lambda: running(calls) == 0)
    assert sum(client.chooser.running(r) for r in "ab") == 0


@over(run)
async def test_a_refusal_is_raised_and_leaves_nothing(calls: DirectCalls, client: RayEngineClient) -> None:
    bad = GenerationRequest(request_id="x.1", prompt_token_ids=(), sampling=SamplingParams(seed=0))
    with pytest.raises(InvalidRequest, match="must not be empty"):
        await tokens(client, bad)
    with pytest.raises(InvalidRequest) as refused:
        async for _ in client.generate([request("x.0", num=1000), bad]):
            pass
    assert refused.value.request_id == "x.1"
    await until(lambda: running(calls) == 0)


@over(run, replicas=())
async def test_overload_spills_to_the_other_replica_then_is_raised(calls: DirectCalls, client: RayEngineClient) -> None:
    calls.add("small", max_running=0)
    calls.add("large", max_running=1)
    client.set_replicas(("small", "large"))
    await all_open(client)
    first = client.generate([request("first.0", num=ENDLESS)])
    await anext(first)
    with pytest.raises(Overloaded):
        await tokens(client, request("second.0"))
    await first.aclose()


@over(run, replicas=("a", "b", "c"), step_s=0.005)
async def test_turns_of_one_session_meet_again_when_their_replica_dies(
    calls: DirectCalls, client: RayEngineClient
) -> None:
    await all_open(client)
    turns = [f"turn{i}" for i in range(3)]
    work = [asyncio.ensure_future(tokens(client, request(f"{t}.0", num=ENDLESS, session_id="s"))) for t in turns]
    await until(lambda: running(calls) == 3)
    (home,) = [r for r, engine in calls.engines.items() if engine.admitted]
    others = [engine for r, engine in calls.engines.items() if r != home]
    calls.kill(home)
    client.set_replicas([r for r in "abc" if r != home])
    await until(lambda: sum(len(engine.admitted) for engine in others) == 3)
    assert sorted(len(engine.admitted) for engine in others) == [0, 3]
    moved = [r.request_id.partition("~")[0] for engine in others for r in engine.admitted]
    assert moved == turns
    for each in work:
        each.cancel()
    await asyncio.gather(*work, return_exceptions=True)


@over(run, step_s=0.005)
async def test_a_resumed_request_asks_for_the_rest(calls: DirectCalls, client: RayEngineClient) -> None:
    await all_open(client)
    asked = request(num=60, min_tokens=40)
    asked = replace(asked, sampling=replace(asked.sampling, prompt_logprobs=1))
    work = asyncio.ensure_future(tokens(client, asked))
    await until(lambda: running(calls) == 1)
    (home,) = [r for r, engine in calls.engines.items() if engine.admitted]
    (other,) = {"a", "b"} - {home}
    await until(lambda: calls.engines[home].stats()["in_flight"].get("r.0", 0) >= 5)
    calls.kill(home)
    client.set_replicas((other,))
    ids, _ = await work
    assert ids == expected(asked)
    (resumed,) = calls.engines[other].admitted
    num_emitted = resumed.output_offset
    assert num_emitted >= 1
    assert resumed.request_id == "r~1.0"
    assert resumed.prompt_token_ids == (*asked.prompt_token_ids, *ids[:num_emitted])
    assert resumed.sampling.max_tokens == 60 - num_emitted
    assert resumed.sampling.min_tokens == max(40 - num_emitted, 0)
    assert resumed.sampling.prompt_logprobs is None  # they were told


@over(run, replicas=("a",))
async def test_an_abort_reaches_the_replica_by_its_name(calls: DirectCalls, client: RayEngineClient) -> None:
    stays = client.generate([request("stays.0", num=ENDLESS)])
    goes = client.generate([request("goes.0", num=ENDLESS)])
    await anext(stays)
    await anext(goes)
    await goes.aclose()
    await until(lambda: list(calls.engines["a"].stats()["in_flight"]) == ["stays.0"])
    assert client.num_ready() == 1  # by an abort, not by losing the stream
    assert calls.num_opened == 1
    await stays.aclose()


def test_a_stream_that_ends_aborts_what_its_subscriber_had() -> None:
    async def main() -> None:
        engine = FakeEngineLoop(step_s=0.001)
        engine.start()
        server = ReplicaServer("a", engine)
        streams = {name: server.events(replica_id="a", subscriber=name) for name in ("one", "two")}
        for name, stream in streams.items():
            await anext(stream)
            asked = replace(request(f"{name}.0", num=ENDLESS), subscriber=name)
            assert await server.submit_many(replica_id="a", subscriber=name, requests=[asked]) == [None]
            await anext(stream)
        await streams["one"].aclose()
        assert list(engine.stats()["in_flight"]) == ["two.0"]
        with pytest.raises(WrongReplica):
            await server.submit_many(replica_id="a", subscriber="one", requests=[request("late.0")])
        await streams["two"].aclose()
        assert engine.stats()["in_flight"] == {}
        engine.stop()

    asyncio.run(main())


@over(run, replicas=())
async def test_a_turn_that_its_session_s_replica_refuses_does_not_run_elsewhere(
    calls: DirectCalls, client: RayEngineClient
) -> None:
    for name in ("a", "b"):
        calls.add(name, max_running=1)
    client.set_replicas(("a", "b"))
    await all_open(client)
    first = client.generate([request("turn0.0", num=ENDLESS, session_id="s")])
    await anext(first)
    with pytest.raises(Overloaded):
        await tokens(client, request("turn1.0", session_id="s"))
    await tokens(client, request("other.0", session_id="t"))  # spills, if it has to
    await first.aclose()
    assert not client.chooser.is_answering("s")


@over(run)
async def test_a_client_that_stops_ends_what_runs_and_takes_no_more(
    calls: DirectCalls, client: RayEngineClient
) -> None:
    endless = asyncio.ensure_future(tokens(client, request("endless.0", num=ENDLESS)))
    short = asyncio.ensure_future(tokens(client, request("short.0")))
    await until(lambda: running(calls) == 2)
    stopping = asyncio.ensure_future(client.stop(0.2))
    await asyncio.sleep(0)
    with pytest.raises(ReplicaUnavailable, match="stopping"):
        await tokens(client, request("late.0"))
    await stopping
    assert (await short)[0] == expected(request("short.0"))
    ids, last = await endless
    assert ids
    assert (last.finish_reason, last.error) == ("error", "the server is stopping")
    assert not client.num_ready()
    assert all(isinstance(engine.queries[-1], FlushSaves) for engine in calls.engines.values())


def test_a_snapshot_that_cannot_be_taken_is_not_asked_for_at_once_again(monkeypatch: pytest.MonkeyPatch) -> None:
    num_asked = 0
    call = DirectCalls.call

    async def answer(calls: DirectCalls, replica_id: str, method: str, **arguments: Any) -> Any:
        nonlocal num_asked
        if method != "query":
            return await call(calls, replica_id, method, **arguments)
        num_asked += 1
        return ReplicaReport("of another image", 0, math.nan, 0, None, 0, 0, 1.0, is_snapshot=True)  # type: ignore[arg-type]

    async def scenario(calls: DirectCalls, client: RayEngineClient) -> None:
        await until(lambda: num_asked > 0)
        await asyncio.sleep(0.3)
        assert num_asked == 1

    monkeypatch.setattr(DirectCalls, "call", answer)
    run(scenario, replicas=("a",))


def test_the_condition_of_replicas_is_theirs_and_else_what_serve_says_at_most_once_a_moment() -> None:
    said = [Condition("failed", "why"), RuntimeError("no controller"), Condition("loading")]
    num_asked = 0

    def read() -> Condition:
        nonlocal num_asked
        num_asked += 1
        answer = said[num_asked - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def scenario(calls: DirectCalls, client: RayEngineClient) -> None:
        answers = await asyncio.gather(*(client.condition() for _ in range(5)))
        assert (answers, num_asked) == ([Condition("failed", "why")] * 5, 1)
        await asyncio.sleep(ray_engine_client.STATS_MAX_AGE_S)
        assert (await client.condition()).state == "failed"
        calls.add("a")
        client.set_replicas(("a",))
        await all_open(client)
        assert await client.condition() == Condition("ready")
        calls.engines["a"].is_stalled = True
        await until(lambda: not client.num_ready())
        assert (await client.condition()).state == "stalled"
        assert num_asked == 2

    run(scenario, replicas=(), read_condition=read)
