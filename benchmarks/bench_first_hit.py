"""A stranger's path: from a clone and no environment to a cache hit that the live page shows.

    python benchmarks/bench_first_hit.py [--model smollm2] [--show FILE.png]

Clones the commit that is checked out into a temporary folder, with a home of its own and no cache of pip. There it runs
README's command, `make serve MODEL=...`, opens the page's `/ui` in Chromium, and asks twice in its chat. It ends when
the page says that the second prompt was found. The parts are read from what the command leaves: when the environment,
torch and the rest were there, and when it said `ready:`. It is bound by pip: the network, then the writing of 1.7 GB.
Needs Playwright and a `chromium` on PATH.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from harness import PartResult, Run, at_most, options_of  # noqa: E402
from playwright.sync_api import Page, sync_playwright  # noqa: E402

from tests.e2e.server_process import free_port  # noqa: E402

LIMIT_S = 1800.0
FIRST = "A library by the sea lends each book with the notes of its readers. " * 12 + "Who writes the notes?"
QUESTIONS = (FIRST, "And who reads them?")
FOUND = re.compile(r"([\d,]+) prompt tokens, ([\d,]+) found")


def served(folder: Path, model: str) -> tuple[subprocess.Popen[str], str]:
    """`make serve` in a clone, as somebody would run it who has never had it; returns when it is ready."""
    home = folder / "home"
    home.mkdir()
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL", "MNEME", "XDG"))
    }
    kept |= {"HOME": str(home), "PIP_NO_CACHE_DIR": "1", "MAKEFLAGS": ""}
    command = ["make", "serve", f"MODEL={model}", f"PYTHON={sys.base_prefix}/bin/python3", f"PORT={free_port()}"]
    server = subprocess.Popen(
        command, cwd=folder / "mneme", env=kept, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert server.stdout is not None
    for line in server.stdout:
        print(f"  {line}", end="")
        if line.startswith("ready:"):
            return server, line.split()[1]
    raise SystemExit(f"make serve ended with status {server.wait()}")


def ask(page: Page, number: int) -> tuple[int, int]:
    """Ask in the page's chat; returns the prompt's tokens, and those that the page says were found."""
    page.fill("#chat-text", QUESTIONS[number])
    page.click("#chat-form button:text('Send')")
    said = page.locator("#chat small").nth(number)
    said.locator("button").wait_for(timeout=LIMIT_S * 1e3)
    shown = FOUND.search(said.inner_text())
    if shown is None:
        raise SystemExit(f"the page says nothing of what was found: {said.inner_text()}")
    return int(shown[1].replace(",", "")), int(shown[2].replace(",", ""))


def walk(folder: Path, args: Any) -> PartResult:
    clone, began = folder / "mneme", time.time()
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    cloned = time.time()
    server, url = served(folder, args.model)
    ready = time.time()
    try:
        with sync_playwright() as api:
            browser = api.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(f"{url}/ui")
            page.wait_for_selector("text=ready,")
            ask(page, 0)
            tokens, found = ask(page, 1)
            ended = time.time()
            if args.show:
                page.screenshot(path=args.show)
            browser.close()
    finally:
        os.killpg(server.pid, signal.SIGINT)
        server.wait(60)
    (torch,) = clone.glob(".venv/lib/python*/site-packages/torch-*.dist-info/RECORD")
    marks = {
        "clone": cloned,
        "environment": (clone / ".venv/bin/pip").stat().st_mtime,
        "torch": torch.stat().st_mtime,
        "the rest": (clone / ".venv/.ready").stat().st_mtime,
        "model, and server ready": ready,
        "page, two questions": ended,
    }
    part = PartResult(name="first hit", title=f"{args.model}: {found} of {tokens} prompt tokens found")
    for name, end in marks.items():
        part.rows.append({"part": name, "s": end - began - sum(row["s"] for row in part.rows)})
    part.checks = [at_most("from a clone to a visible hit", ended - began, 300, "s")]
    if not found:
        raise SystemExit("the page showed no hit")
    return part


def main() -> None:
    parser = options_of(__doc__, quick="nothing: it is one run", seed=False, out=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--show", metavar="FILE.png", help="the page as it is at the end")
    args = parser.parse_args()
    run = Run("first_hit", args, model=args.model)
    with tempfile.TemporaryDirectory(prefix="mf-", dir="/tmp") as folder:  # short: Ray's sockets lie below it
        part = run.show(walk(Path(folder), args))
    run.end({part.name: part.rows})


if __name__ == "__main__":
    main()
