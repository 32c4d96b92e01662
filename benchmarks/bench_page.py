"""What the live page costs with a large prefix forest: a frame of it in Chromium, and the answer that it is drawn from.

    python benchmarks/bench_page.py [--runs 10000]

An engine without a model (the tests' fake runner) is asked prompts that branch in four at every page, until its forest
has so many runs. The API over it is served on 127.0.0.1, and the page is opened in headless Chromium at 1280 by 900. A
frame is drawn again and again: layout, canvas, and its pixels, which are read back so that none is put off. In a tree
most runs are narrower than a pixel and drawn together; so the page is also given an answer of as many runs that are all
wide enough, in 24 rows. Bound by one core: Chromium draws in software here. Needs Playwright and a `chromium` on PATH.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import httpx  # noqa: E402
from harness import PartResult, Run, at_most, options_of  # noqa: E402
from playwright.sync_api import Page, sync_playwright  # noqa: E402

from mneme.replicas.queries import GetTree  # noqa: E402
from mneme.replicas.request import GenerationRequest, SamplingParams, StepMessage  # noqa: E402
from tests.cluster.api_fixtures import TOKENIZER, serving  # noqa: E402
from tests.cluster.real_engines import TwoEngines  # noqa: E402

PAGE_TOKENS, BRANCHES, TOGETHER = 16, 4, 500
FRAMES = """async (number) => {
  const took = [], canvas = document.querySelector("#tree").getContext("2d");
  for (let index = 0; index < number; index++) {
    await new Promise(requestAnimationFrame);
    const began = performance.now();
    dispatchEvent(new Event("resize"));
    canvas.getImageData(0, 0, 1, 1);
    took.push([performance.getEntriesByName("forest")[0].duration, performance.now() - began]);
  }
  return took;
}"""


def filled(num_runs: int) -> TwoEngines:
    """Return engines of which the first has so many runs: of prompts that end in the leaves of a tree."""
    engines = TwoEngines((num_runs + 64, 64), has_tier=False)
    prompts: list[list[int]] = [[]]
    for index in range(num_runs):
        page = [(index * 7 + offset * 3) % TOKENIZER.vocab_size for offset in range(PAGE_TOKENS)]
        prompts.append([*prompts[(index - 1) // BRANCHES + 1], *page])
    leaves, loop = prompts[(num_runs - 2) // BRANCHES + 2 :], engines.loops["a"]
    params, ended = SamplingParams(temperature=0, max_tokens=1, seed=0), threading.Semaphore(0)

    def deliver(said: StepMessage) -> None:
        for event in said.events:
            if event.finish_reason is not None:
                ended.release()

    loop.subscribe("page", deliver)
    for first in range(0, len(leaves), TOGETHER):
        batch = [
            GenerationRequest(
                request_id=f"{first + index}.0", prompt_token_ids=tuple(ids), sampling=params, subscriber="page"
            )
            for index, ids in enumerate(leaves[first : first + TOGETHER])
        ]
        assert not any(loop.submit_many(batch))
        for _ in batch:
            assert ended.acquire(timeout=600)
    return engines


def wide(num_runs: int) -> dict[str, Any]:
    """Return an answer of equal lineages of 24 runs."""
    num_rows = 24
    num_tops = -(-num_runs // num_rows)
    same: dict[str, Any] = {**dict.fromkeys(("start", "host", "running", "sessions"), 0), "kind": "prompt", "idle_s": 1}
    runs = [
        {**same, "parent": max(i - num_tops, -1), "tokens": 16, "device": 16, "uses": i % 9, "below": 16 * num_rows}
        for i in range(num_runs)
    ]
    tree = {"replica": "a", "runs": runs, "texts": ["the quick brown fox"] * num_runs}
    return {"replicas": [{**tree, "num_runs": num_runs, "num_tokens": 16 * num_runs}]}


def frames_of(page: Page, num_frames: int) -> tuple[str, list[list[float]]]:
    """Return what the page says that it has drawn, and for each frame the ms of its script and of all."""
    page.wait_for_function("() => document.querySelector('#tree-size').textContent.includes('drawn')")
    return page.inner_text("#tree-size"), page.evaluate(FRAMES, num_frames)


def measure(engines: TwoEngines, num_runs: int, num_frames: int) -> PartResult:
    loop = engines.loops["a"]
    asked = GetTree("", 60, 0, 10_000)
    began = time.perf_counter()
    tree = loop.query(asked)
    engine_ms = (time.perf_counter() - began) * 1e3
    with serving(engine=engines) as server, sync_playwright() as api:
        began = time.perf_counter()
        answer = httpx.get(f"{server.url}/v1/kv/tree?depth=60&max_runs=10000", timeout=60).raise_for_status()
        answer_ms = (time.perf_counter() - began) * 1e3
        browser = api.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{server.url}/ui")
        drawn, frames = frames_of(page, num_frames)
        page.route("**/v1/kv/tree*", lambda route: route.fulfill(json=wide(num_runs)))
        page.reload()
        all_drawn, wide_frames = frames_of(page, num_frames)
        browser.close()
    assert len(tree["runs"]) == min(num_runs, 10_000), len(tree["runs"])
    part = PartResult(name="forest", title=f"{drawn}; wide: {all_drawn}")
    rows: dict[str, list[float]] = {
        "frame: the forest's script": [script for script, _ in frames],
        "frame: all, with its pixels": [whole for _, whole in frames],
        "wide: the forest's script": [script for script, _ in wide_frames],
        "wide: all, with its pixels": [whole for _, whole in wide_frames],
        "the engine, in parts between steps": [engine_ms],
        f"the answer, {len(answer.content) / 1e6:.1f} MB": [answer_ms],
    }
    for name, took in rows.items():
        part.rows.append({"part": name, "median ms": statistics.median(took), "longest ms": max(took)})
    part.checks = [at_most("a frame of the forest", max(part.rows[row]["longest ms"] for row in (1, 3)), 100, "ms")]
    return part


def main() -> None:
    parser = options_of(__doc__, quick="10 frames instead of 50", seed=False, out=True)
    parser.add_argument("--runs", type=int, default=10_000)
    args: Any = parser.parse_args()
    run = Run("page", args, runs=args.runs)
    engines = filled(args.runs)
    try:
        part = run.show(measure(engines, args.runs, 10 if args.quick else 50))
    finally:
        engines.close()
    run.end({part.name: part.rows})


if __name__ == "__main__":
    main()
