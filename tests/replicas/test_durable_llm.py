"""Sessions of the offline API over processes: the same answers as if there had been one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mneme import LLM, SamplingParams

pytestmark = pytest.mark.engine

TURNS = ["The capital of France", " and of Spain", " is not", " but also", " the river"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def load(folder: Path | None, **engine: Any) -> LLM:
    disk = None if folder is None else {"folder": str(folder), "capacity_bytes": 1 << 24}
    config = {"num_pages": 64, "page_size": 16, **engine}
    cache = None if disk is None else {"disk": disk, "host_bytes": 1 << 24, "chunk_tokens": 64}
    return LLM(dtype="float32", config=config, cache=cache)


def converse(llm: LLM, history: str, turns: list[str]) -> tuple[str, list[tuple[int, ...]]]:
    """A client that sends all of its history; the prompt's ids come back with the answer's."""
    said = []
    for turn in turns:
        history += turn
        (output,) = llm.generate([history], GREEDY, session_ids=["s"])
        history += output.outputs[0].text
        said.append(output.outputs[0].token_ids)
    return history, said


def session_ids(llm: LLM) -> list[int]:
    log = llm.engine.sessions.get(("", "s"))
    return log.ids.tolist()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_session_goes_on_in_another_process_token_for_token(tmp_path: Path, kv_dtype: str) -> None:
    whole = load(None, kv_dtype=kv_dtype)
    history, expected = converse(whole, "", TURNS)
    ids = session_ids(whole)
    whole.close()
    text, said = "", []
    for first in range(0, len(TURNS), 2):
        llm = load(tmp_path, kv_dtype=kv_dtype)
        text, answers = converse(llm, text, TURNS[first : first + 2])
        said += answers
        assert session_ids(llm) == ids[: len(session_ids(llm))]
        llm.close()
    assert (text, said) == (history, expected)
    llm = load(tmp_path, kv_dtype=kv_dtype)
    text, _ = converse(llm, text, [" once more"])
    assert session_ids(llm)[: len(ids)] == ids
    llm.close()


def test_a_session_that_reused_documents_is_computed_exactly_after_a_restart(tmp_path: Path) -> None:
    texts = ["Anna went to the old tower by the river. " * 3, "Bert has sold a red boat to Karl. " * 3]
    documents = [{"type": "document", "text": text} for text in texts]
    question = {"type": "text", "text": "Who has the boat?"}
    llm = load(tmp_path)
    reuse = {"mode": "full_reuse", "min_tokens": 4}
    (first,) = llm.generate([{"prompt": [*documents, question]}], GREEDY, session_ids=["s"], blend=reuse)
    ids = session_ids(llm)
    llm.close()
    question["text"] += first.outputs[0].text + TURNS[3]
    llm, exact = load(tmp_path), load(None)
    (again,) = llm.generate([{"prompt": [*documents, question]}], GREEDY, session_ids=["s"])
    assert list(again.prompt_token_ids[: len(ids)]) == ids
    (expected,) = exact.generate([{"prompt_token_ids": list(again.prompt_token_ids)}], GREEDY)
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids
    exact.close()
    llm.close()
