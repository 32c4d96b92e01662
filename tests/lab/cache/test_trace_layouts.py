"""Each layout of traces, as its source writes it: what the simulators and the load generator read of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mneme.cluster.cli.main import main
from mneme.errors import ConfigError
from mneme.lab.bench.workloads import sessions_of_trace
from mneme.lab.cache.traces import LAYOUTS, read_paced_trace, read_trace
from mneme.lab.cluster.workload import infinite_hit_ratio, read_workload


def chat(name: int, parent: int, at_s: float, num_input: int, num_output: int, hash_ids: list[int]) -> dict[str, Any]:
    lengths = {"input_length": num_input, "output_length": num_output, "type": "text"}
    return {"chat_id": name, "parent_chat_id": parent, "timestamp": at_s, **lengths, "hash_ids": hash_ids}


BAILIAN = [
    chat(7, -1, 61.114, 40, 9, [5, 6, 7]),
    chat(9, -1, 61.5, 20, 1, [6, 5]),
    chat(8, 7, 71.2, 60, 3, [5, 6, 9, 5]),
    chat(10, 8, 80, 80, 3, [5, 6, 9, 5, 1]),
]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_SESSIONS = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
SHARE_GPT = [
    {"id": "a_0", "conversations": [
        {"from": "gpt", "value": "x" * 400},
        {"from": "human", "value": "four" * 20}, {"from": "gpt", "value": "four" * 30},
        {"from": "human", "value": "four" * 10}, {"from": "gpt", "value": "é" * 20},
        {"from": "human", "value": "no answer"},
    ]},
    {"id": "a_0", "conversations": [{"from": "human", "value": "1234"}, {"from": "gpt", "value": "5"}]},
]  # fmt: skip
MESSAGES = [
    {"role": "system", "content": "four" * 8}, {"role": "user", "content": [{"type": "text", "text": "ls"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "four" * 3},
    {"role": "assistant", "content": "four" * 2},
]  # fmt: skip


def call(t: float, num_input: int, hash_ids: list[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "model": "m", "in": num_input, "out": 5, "hash_ids": hash_ids, **more}


WEKA = {
    "id": "trace_0001", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "tool_tokens": 0,
    "requests": [
        call(0.0, 128, [1, 2], api_time=1.5), call(9.5, 200, [1, 2, 3], think_time=0.25),
        {"t": 10.0, "type": "subagent", "agent_id": "s", "requests": [call(0.0, 64, [8]), call(4.0, 100, [8, 9])]},
        {"t": 20.0, "type": "subagent", "agent_id": "s", "requests": [call(20.5, 64, [8])]},
        call(30.0, 256, [1, 2, 3, 4]),
    ],
}  # fmt: skip


def written(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    if not isinstance(content, str):
        lines = [json.dumps(each) for each in content]
        content = "[" + ",\n".join(lines) + "]" if name.endswith(".json") else "".join(line + "\n" for line in lines)
    path.write_text(content)
    return path


def told(path: Path) -> list[tuple[float | None, int, int, str | None]]:
    return [(each.at_s, each.input_tokens, each.output_tokens, each.session_id) for each in read_paced_trace(path)]


def test_bailians_seconds_are_seconds_and_its_chats_are_sessions(tmp_path: Path) -> None:
    path = written(tmp_path, "bailian.jsonl", BAILIAN)
    requests = read_paced_trace(path)
    assert [each.session_id for each in requests] == ["7", "9", "7", "7"]
    assert [each.at_s for each in requests] == pytest.approx([0.0, 0.386, 10.086, 18.886])
    assert {each.block_tokens for each in requests} == {16}
    first, other, second, third = (each.block_ids or [] for each in requests)
    assert second[:2] == first[:2]
    assert third[:4] == second
    assert not set(other) & {*first, *second, *third}  # the same blocks behind others are other prefixes
    assert second[3] != second[0]


def test_burst_gpts_failed_requests_are_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, "burst.csv", BURST + "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,0,0,0,API log\n"
                   "118.5,GPT-4,1087,230,1317,API log\n")  # fmt: skip
    assert told(path) == [(0.0, 472, 18, None), (113.5, 1087, 230, None)]
    assert "1 of 3 requests had failed (no response) and are left out" in caplog.text
    with pytest.raises(ConfigError, match="has no requests"):
        read_trace(written(tmp_path, "failed.csv", BURST + "5,ChatGPT,472,0,472,API log\n"))


def test_burst_gpts_sessions_go_on_while_their_prompts_grow(tmp_path: Path) -> None:
    rows = ["0,3,1.0,ChatGPT,100,50,150,Conversation log", "9,,1.0,GPT-4,100,50,150,API log",
            "20,3,1.0,ChatGPT,170,10,180,Conversation log", "30,3,1.0,ChatGPT,60,10,70,Conversation log",
            "40,3,1.0,ChatGPT,75,10,85,Conversation log"]  # fmt: skip
    path = written(tmp_path, "burst.csv", BURST_SESSIONS + "\n".join(rows) + "\n")
    fresh = "3 from line 5"
    assert told(path) == [(0.0, 100, 50, "3"), (9.0, 100, 50, None), (20.0, 20, 10, "3"), (30.0, 60, 10, fresh),
                          (40.0, 5, 10, fresh)]  # fmt: skip
    trace = read_trace(path, 10)
    assert [each.input_tokens for each in trace] == [100, 100, 170, 60, 75]
    assert trace[2].block_ids[:10] == trace[0].block_ids
    assert trace[4].block_ids[:6] == trace[3].block_ids


@pytest.mark.parametrize("name", ["share.json", "share.jsonl"])
def test_conversations_are_sessions_of_which_texts_are_counted(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, name, SHARE_GPT)
    assert told(path) == [(None, 20, 30, "0"), (None, 10, 10, "0"), (None, 1, 1, "1")]
    trace = read_trace(path, 10)
    assert [each.arrival_s for each in trace] == [0.0, 1.0, 60.0]
    assert [each.input_tokens for each in trace] == [20, 1, 20 + 30 + 10]
    assert trace[2].block_ids[:2] == trace[0].block_ids
    assert "the trace has no times: a session begins each second" in caplog.text


def test_an_agents_session_and_its_subagents(tmp_path: Path) -> None:
    for path in (
        written(tmp_path, "weka.jsonl", [WEKA, WEKA]),
        written(tmp_path, "weka.json", json.dumps([WEKA, WEKA], indent=2)),
    ):
        requests = read_paced_trace(path)
        assert {each.block_tokens for each in requests} == {64}
        first, second = requests[:6], requests[6:]
        assert [(each.session_id, each.at_s) for each in first] == [
            ("0", 0.0), ("0", 9.5), ("0/2", 10.0), ("0/2", 14.0), ("0/3", 20.5), ("0", 30.0)
        ]  # fmt: skip
        assert [each.at_s for each in second] == [(each.at_s or 0.0) + 1.0 for each in first]
        ids = [each.block_ids or [] for each in first]
        assert [len(each) for each in ids] == [2, 4, 1, 2, 1, 4]
        assert ids[1][:2] == ids[0]
        assert ids[5][:3] == ids[1][:3]
        assert ids[5][3] != ids[1][3]  # a last block without a hash is nobody else's
        assert ids[2] == ids[4] == ids[3][:1]
        assert not {block for each in second for block in each.block_ids or []} & {
            block for each in ids for block in each
        }
    (one,) = {each.block_tokens for each in read_paced_trace(written(tmp_path, "one.json", json.dumps(WEKA)))}
    assert one == 64


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("a.jsonl", [BAILIAN[0], {**BAILIAN[1], "timestamp": "61"}], "a.jsonl:2: timestamp: must be s from 0"),
        ("a.jsonl", [BAILIAN[0], {**BAILIAN[1], "chat_id": None}], "a.jsonl:2: chat_id: must be given"),
        ("a.jsonl", [BAILIAN[0], {**BAILIAN[1], "hash_ids": [1]}], "a.jsonl:2: hash_ids: 1 blocks are not 20 tokens"),
        ("a.jsonl", [BAILIAN[0], {"chat_id": 1, "timestamp": 3}], r"a.jsonl:2: must have .* \(has no input_le"),
        ("a.jsonl", [{"prompt": "x"}], "a.jsonl:1: has the fields of no trace that is known: Bailian's chat_id"),
        ("a.csv", "a,b,c\r\n", "a.csv:1: has the fields of no trace .* TIMESTAMP, "),
        ("a.csv", AZURE + "2023-11-16 18:17:03,9\r\n", "a.csv:2: must have 3 fields"),
        ("a.csv", AZURE + "yesterday,9,1\r\n", "a.csv:2: TIMESTAMP: is no time"),
        ("a.csv", AZURE + "2023-11-16 18:17:03,0,1\r\n", "a.csv:2: ContextTokens: must be"),
        ("a.csv", AZURE, "a.csv: has no requests"),
        ("a.csv", BURST + "5,m,472,x,490,log\n", "a.csv:2: Response tokens: must be a whole number"),
        ("a.csv", BURST + "soon,m,472,1,490,log\n", "a.csv:2: Timestamp: must be a number"),
        ("a.csv", BURST + "5,m,472,1\n", r"a.csv:2: must have 6 fields \(got 4\)"),
        ("a.json", "", "a.json: has no requests"),
        ("a.json", '[{"conversations": []},\n\n{"conversations": 3}]', "a.json:3: conversations: must be a list"),
        ("a.json", '[{"conversations": []},\n{"messages": []}]', "a.json:2: must have conversations"),
        ("a.json", '[{"messages": []},\n{"messages": ["hi"]}]', r"a.json:2: messages\[0\]: must be an object with a"),
        ("a.json", '[{"messages": []},\n\n', "a.json:3: is no JSON"),
        ("a.json", '[{"messages": []},\n{"messages": [}]', "a.json:2: is no JSON"),
        pytest.param("a.json", "[" * 100_000, "a.json:1: is no JSON", id="deep"),
        ("a.jsonl", [{"requests": {}}], "a.jsonl:1: requests: must be a list of objects"),
        ("a.jsonl", [{"requests": [{"in": 3, "out": 1}]}], "a.jsonl:1: t: must be s from 0"),
        ("a.jsonl", [{"requests": [call(0.0, 3, [])]}, {"requests": [], "block_size": 9}], "a.jsonl:2: block_size"),
        ("a.jsonl", [{"requests": [call(0.0, 3, ["x"])]}], "a.jsonl:1: hash_ids: must be a whole number"),  # type: ignore[list-item]
    ],
)  # fmt: skip
def test_a_bad_record_is_named_by_its_line(tmp_path: Path, name: str, content: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        read_paced_trace(written(tmp_path, name, content))


SAMPLES = {
    "Bailian": ("a.jsonl", BAILIAN, 4),
    "Mooncake": ("a.jsonl", [{"timestamp": 1500, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]},
                             {"timestamp": 500, "input_length": 9, "output_length": 2}], 2),
    "Azure": ("a.csv", AZURE + "2023-11-16 18:15:46,900,44\r\n", 1),
    "BurstGPT": ("a.csv", BURST + "5,ChatGPT,472,18,490,Conversation log\n", 1),
    "ShareGPT": ("a.json", SHARE_GPT, 3),
    "vLLM multi-turn": ("a.json", [{"id": "a", "messages": MESSAGES}], 2),
    "Weka": ("a.jsonl", [WEKA], 6),
}  # fmt: skip


def test_each_layout_has_its_sample() -> None:
    assert [each.name for each in LAYOUTS] == list(SAMPLES)


@pytest.mark.parametrize("layout", SAMPLES)
def test_both_simulators_and_the_load_generator_read_the_same(
    tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, content, number = SAMPLES[layout]
    path = written(tmp_path, name, content)
    trace, turns = read_trace(path), read_workload(str(path), None)
    sessions = sessions_of_trace(read_paced_trace(path), 0.75, 0)
    assert len(trace) == len(turns) == sum(len(session.turns) for session in sessions) == number
    assert [each.arrival_s for each in trace] == pytest.approx([turn.at_s for turn in turns])
    assert [each.input_tokens for each in trace] == [turn.input_tokens for turn in turns]
    assert (
        main(["simulate", "cache", "--trace", str(path), "--capacity-blocks", "inf", "--policy", "lru", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["block_tokens"] == trace[0].block_tokens
    assert found["block_hit_ratio"] == pytest.approx(infinite_hit_ratio(turns), abs=1e-6)
    assert main(["simulate", "cluster", "--trace", str(path), "--replicas", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_requests"] == number
