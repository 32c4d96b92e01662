"""How deep the calls go that hold a page and that release one: from the scheduler's call down to the last of them."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

import pytest

from mneme.replicas.engine.engine import Engine
from tests.replicas.fake_runner import FakeRunner
from tests.replicas.schedule.test_engine_policy import make_engine, make_request, run

MOST_FRAMES = {"extend": 4, "release": 5}  # by the call of the forest, with whoever makes it


def deepest_calls(engine: Engine, entries: dict[str, int]) -> dict[str, list[str]]:
    """The deepest stack below each call of the forest by the scheduler, in the engine's steps to the end."""
    found: dict[str, list[str]] = {name: [] for name in entries}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        names: list[str] = []
        each: FrameType | None = frame
        while each is not None and "/replicas/schedule/" not in each.f_code.co_filename:
            names.append(each.f_code.co_name)
            each = each.f_back
        entry = names[-1] if each is not None and names else None
        if each is not None and entry in found and len(names) >= len(found[entry]):
            found[entry] = [each.f_code.co_name, *reversed(names)]

    gc.collect()  # what other tests left would end in the midst of a call, and go deeper
    gc.disable()
    sys.setprofile(note)
    try:
        while engine.has_work:
            engine.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


@pytest.mark.parametrize("num_host_pages", [0, 16])
@pytest.mark.parametrize("eviction", ["lru", "lookahead", "returning", "density"])
def test_a_page_is_held_and_released_in_few_frames(eviction: str, num_host_pages: int) -> None:
    """A cached page that a policy may have as a victim, for a session and for nobody."""
    engine = make_engine(runner=FakeRunner(64, 4, num_host_pages=num_host_pages), eviction=eviction)
    prompt = [i % 5 for i in range(30)]
    engine.submit(make_request("first", prompt, session_id="s"))
    run(engine)
    engine.submit(make_request("again", prompt, session_id="t"))
    engine.submit(make_request("other", [*prompt[:10], 4, 4, 4]))
    for entry, names in deepest_calls(engine, MOST_FRAMES).items():
        assert 2 < len(names) <= MOST_FRAMES[entry], " > ".join(names)
