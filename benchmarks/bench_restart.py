"""One prompt asked three times: computed, found on the device, and found on the disk after the server was stopped.

    python benchmarks/bench_restart.py [--model smollm2] [--tokens 4000] [--repeats 5] [--quick] [--out FOLDER]

`mneme serve --local MODEL` with a folder for its disk tier, one engine thread. Each repeat has a prompt of its own:
real text (`pydoc_data.topics`, PSF licence) and a question, about `--tokens` long. All are asked, and asked again; the
server gets SIGINT, a new process starts on the same folder, and all are asked a third time. Told is the client's time
to the first token of a stream, the median of the repeats, and `usage.kv_details`: where the prompt's KV came from.
Answers must be the same each time. Computed, it is bound by 2 x parameters x tokens multiplications; found, by reading
the KV.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import httpx  # noqa: E402
from harness import PartResult, Run, at_least, at_most, options_of  # noqa: E402
from streams import Heard, stream  # noqa: E402

from tests.e2e.server_process import SERVE, ServerProcess, free_port  # noqa: E402

COMPUTED, DEVICE, DISK = "computed", "found on the device", "found on the disk, after a restart"
CHARS_PER_TOKEN = 3.3  # of this text, in vocabularies of 49k and more
ANSWER = 16  # tokens


def prompts(count: int, num_tokens: int) -> list[str]:
    """Passages of real text that have no beginning in common, each with a question behind it."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    size = int(num_tokens * CHARS_PER_TOKEN)
    passages = [text[start : start + size] for start in range(0, count * size, size)]
    return [
        f"{number}. {passage}\n\nSay in one sentence what this is about." for number, passage in enumerate(passages)
    ]


def ask(url: str, model: str, prompt: str) -> Heard:
    """A streamed chat."""
    said = {"role": "user", "content": prompt}
    body = {"model": model, "messages": [said], "max_tokens": ANSWER, "temperature": 0}
    with httpx.Client(base_url=url, timeout=600) as http:
        return stream(http, "/v1/chat/completions", body)


def rounds(args: Any, given: Sequence[str]) -> dict[str, list[Heard]]:
    """All prompts in each state of the server."""
    heard: dict[str, list[Heard]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for names in ((COMPUTED, DEVICE), (DISK,)):
            disk = f"cache.disk={{folder: {folder}, capacity_bytes: {8 << 30}}}"
            command = [*SERVE, "--local", args.model, "--port", str(free_port()), "--set", "engine.num_threads=1"]
            server = ServerProcess([*command, "--set", disk, "--set", f"engine.dtype={args.dtype}"])
            try:
                url = server.await_ready()
                model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
                ask(url, model, "Hello.")
                for name in names:
                    heard[name] = [ask(url, model, prompt) for prompt in given]
                server.stop()
            finally:
                server.discard()
    return heard


def compare(args: Any) -> PartResult:
    heard = rounds(args, prompts(args.repeats, args.tokens))
    part = PartResult(name="restart", title=f"{args.model}, {args.dtype}, {args.repeats} prompts")
    for name, answers in heard.items():
        usage = answers[-1].usage
        part.rows.append(
            {
                "prompt is": name,
                "first token ms": 1e3 * statistics.median(each.first_s for each in answers),
                "slowest ms": 1e3 * max(each.first_s for each in answers),
                "tokens": usage["prompt_tokens"],
                **{key: value for key, value in usage["kv_details"].items() if isinstance(value, int)},
            }
        )
    medians = {row["prompt is"]: row["first token ms"] for row in part.rows}
    num_other = sum(again.text != first.text for first, *rest in zip(*heard.values(), strict=True) for again in rest)
    part.checks = [
        at_most("answers that changed", float(num_other), 0, "answers"),
        at_least("first token after a restart, times sooner than computed", medians[COMPUTED] / medians[DISK], 10),
    ]
    return part


def draw(folder: Path, closing: dict[str, Any]) -> None:
    """Three bars, for light and dark pages."""
    rows = closing["results"]["restart"]
    most, widest, lines = max(row["first token ms"] for row in rows), 560, []
    for index, row in enumerate(rows):
        top, ms = 34 + 46 * index, row["first token ms"]
        width = max(widest * ms / most, 2)
        label = f"{ms:,.0f} ms" if ms < 1e4 else f"{ms / 1e3:,.1f} s"
        lines += [
            f'<text x="0" y="{top}">{row["prompt is"]}</text>',
            f'<rect y="{top + 7}" width="{width:.1f}" height="15" rx="2"/>',
            f'<text class="figure" x="{width + 8:.1f}" y="{top + 19}">{label}</text>',
        ]
    title = f"Time to the first token of {rows[0]['tokens']:,} tokens, {closing['model']}, one CPU core"
    style = (
        "text{font:13px system-ui,sans-serif;fill:#1f2328}.title{font-weight:600}.figure{font-weight:600}"
        "rect{fill:#0f6b4a}@media(prefers-color-scheme:dark){text{fill:#e6edf3}rect{fill:#4fa583}}"
    )
    size = f'viewBox="0 0 680 {46 * len(rows) + 24}" width="680" role="img"'
    body = "\n".join(
        [f"<title>{title}</title><style>{style}</style>", f'<text class="title" y="14">{title}</text>', *lines]
    )
    (folder / "restart.svg").write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{body}\n</svg>\n')


def main() -> None:
    parser = options_of(__doc__, quick="2 prompts of 1,000 tokens", seed=False, out=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.repeats = 1000, 2
    os.environ["OMP_NUM_THREADS"] = "1"
    run = Run("restart", args, threads=1, model=args.model, dtype=args.dtype)
    part = run.show(compare(args))
    run.end({part.name: part.rows}, draw)


if __name__ == "__main__":
    main()
