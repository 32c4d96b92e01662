"""Compares answers with reused documents with those of full recompute, on one engine.

Each case is answered in full, greedily. Then for each selector and ratio:

    KL, top-1  the tokens of the full answer are given to it one by one (teacher forcing): how far its distributions of
               them are from those of full recompute, and whether its most likely token is theirs
    F1, exact  of its own greedy answer against the right ones, normalised as SQuAD does. Where all most likely tokens
               are those of the full answer, that is its answer; else it answers on its own

All tokens of an answer count: the first is drawn from the pass that chose what is computed anew, the others from the KV
that it left. Full recompute has a salt of its own: prompts it has computed would be exact prefixes otherwise.
"""

from __future__ import annotations

import itertools
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from mneme.errors import ConfigError, MnemeError
from mneme.lab.quality.tasks import Case, Task
from mneme.replicas.blend.gate import Measured
from mneme.replicas.documents import EXACT, BlendOptions, BlendUsage, Selector
from mneme.replicas.engine.engine import Engine
from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.replicas.sequence import Sequence as EngineSequence
from mneme.replicas.text.document_parts import EncodedPrompt, StandIns, encode_parts, prompt_parts
from mneme.replicas.text.tokenizer import Tokenizer

BATCH = 16  # cases that run at once, where their KV fits
_COPIES = 3  # of a case's KV that are there at once: its documents, and what two requests computed with them
_KEPT_BYTES = 1 << 29  # of the distributions of their full answers, at most
_OFF = BlendOptions(mode="off")


class Arm(NamedTuple):
    """Says how documents are reused."""

    selector: Selector
    ratio: float


@dataclass(slots=True)
class _Said:
    """Holds what one request says; with `text`, what it thinks of each token of that, which it is made to say."""

    text: _Said | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)  # float32 [vocab] of each token
    kl: list[float] = field(default_factory=list)  # nats
    agrees: list[bool] = field(default_factory=list)
    blend: BlendUsage | None = None


@dataclass(slots=True)
class _Tally:
    """Sums over the cases of a layout."""

    f1: float = 0.0
    exact: float = 0.0
    kl: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)

    def add(self, scores: tuple[float, float]) -> None:
        self.f1 += scores[0]
        self.exact += scores[1]


def measure(
    engine: Engine,
    tokenizer: Tokenizer,
    task: Task,
    arms: Sequence[Arm],
    *,
    max_tokens: int = 32,
    on_progress: Callable[[int], None] = lambda num_cases: None,
    before_step: Callable[[], None] = lambda: None,
) -> tuple[list[Measured], int]:
    """Measure all arms on all cases; returns a row of each layout and arm, and how many cases were too long.

    Nothing else uses the engine meanwhile. Raises `ConfigError` where no case fits, or nothing can be reused.
    """
    talker, rows, num_left_out = _Talker(engine, tokenizer, task, max_tokens, before_step), [], 0
    most = max(min(BATCH, _KEPT_BYTES // (4 * max_tokens * engine.runner.vocab_size)), 1)
    num_tokens = engine.runner.num_pages * engine.runner.page_size
    for layout, cases in task.cases_by_layout.items():
        fitting = [(case, prompt) for case in cases if (prompt := talker.prompt(case)) is not None]
        num_left_out += len(cases) - len(fitting)
        if not fitting:
            room = f"{engine.capacity} tokens with {max_tokens} of its answer"
            raise ConfigError(f"task: no case of {layout} fits {room}")
        full_tally, tallies = _Tally(), [_Tally() for _ in arms]
        longest = max(len(prompt.token_ids) for _, prompt in fitting) + max_tokens
        batch_size = max(min(most, num_tokens // (_COPIES * longest)), 1)
        for start in range(0, len(fitting), batch_size):
            batch = fitting[start : start + batch_size]
            prompts = [prompt for _, prompt in batch]
            full = talker.run(prompts, _OFF)
            for (case, _), said in zip(batch, full, strict=True):
                full_tally.add(talker.scores(said, case))
            for arm, tally in zip(arms, tallies, strict=True):
                options = BlendOptions(mode="selective", selector=arm.selector, ratio=arm.ratio, min_tokens=1)
                forced = talker.run(prompts, options, full)
                usages = [said.blend for said in forced if said.blend is not None]
                in_full = [each.why for each in usages if each.mode == "off" and each.declined != EXACT.reason]
                if in_full and not _is_exact(options):
                    raise ConfigError(f"{layout}: documents of {len(in_full)} cases are computed in full: {in_full[0]}")
                others = [index for index, said in enumerate(forced) if not all(said.agrees)]
                free = dict(zip(others, talker.run([prompts[index] for index in others], options), strict=True))
                for index, (case, _) in enumerate(batch):
                    tally.add(talker.scores(free.get(index, full[index]), case))
                    tally.kl += forced[index].kl
                    tally.agrees += forced[index].agrees
            on_progress(len(batch))
        rows += [
            Measured(
                layout=layout, selector=arm.selector, ratio=arm.ratio, num_cases=len(fitting),
                score=tally.f1 / len(fitting), score_full=full_tally.f1 / len(fitting),
                exact_match=tally.exact / len(fitting), exact_match_full=full_tally.exact / len(fitting),
                kl=sum(tally.kl) / len(tally.kl), top1=sum(tally.agrees) / len(tally.agrees),
            )
            for arm, tally in zip(arms, tallies, strict=True)
        ]  # fmt: skip
    return rows, num_left_out


class _Talker:
    """Runs requests of a task."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, task: Task, max_tokens: int, before_step: Callable[[], None]
    ) -> None:
        self._before_step = before_step
        self._engine, self._tokenizer, self._task, self._max_tokens = engine, tokenizer, task, max_tokens
        self._is_chat = task.is_chat and tokenizer.has_chat_template
        self._said: dict[str, _Said] = {}
        self._ids = itertools.count()
        engine.on_logits = self._hear

    def prompt(self, case: Case) -> EncodedPrompt | None:
        """Return the ids of a case; None if it is too long with its answer."""
        given, tokenizer = self._task.parts(case), self._tokenizer
        if self._is_chat:
            stand_ins = StandIns()
            content = stand_ins.content(given, "passages", group=0)
            parts = stand_ins.cut(tokenizer.render_chat([{"role": "user", "content": content}]))
        else:
            parts = prompt_parts(given, ())
        encoded = encode_parts(tokenizer, parts, add_special_tokens=not self._is_chat)
        return encoded if len(encoded.token_ids) + self._max_tokens <= self._engine.capacity else None

    def run(self, prompts: Sequence[EncodedPrompt], blend: BlendOptions, texts: Sequence[_Said] = ()) -> list[_Said]:
        """Answer prompts together; with `texts` they are made to say those. Raises `MnemeError` if one fails."""
        said = [_Said(text) for text in texts] or [_Said() for _ in prompts]
        names = [f"quality-{next(self._ids)}" for _ in prompts]
        self._said = dict(zip(names, said, strict=True))
        for index, (name, prompt, one) in enumerate(zip(names, prompts, said, strict=True)):
            num_tokens = self._max_tokens if one.text is None else len(one.text.ids)
            is_line = one.text is None and not self._is_chat
            params = SamplingParams(
                temperature=0, max_tokens=num_tokens, stop=self._task.end if is_line else (),
                ignore_eos=one.text is not None, seed=index,
            )  # fmt: skip
            salt = "full" if blend.mode == "off" else "control" if _is_exact(blend) else "blend"
            asked = GenerationRequest(
                request_id=name, prompt_token_ids=prompt.token_ids, sampling=params, salt=salt,
                documents=prompt.documents, blend=blend,
            )  # fmt: skip
            self._engine.submit(asked)
        while self._engine.has_work:
            self._before_step()
            for event in self._engine.step():
                one = self._said[event.request_id]
                if event.error is not None:
                    raise MnemeError(f"{event.request_id}: {event.error}")
                one.ids += event.token_ids
                if event.usage is not None:
                    one.blend = event.usage.blend
        return said

    def scores(self, said: _Said, case: Case) -> tuple[float, float]:
        """F1 and exact match of an answer; what a thinking model thinks is no part of it."""
        text = self._tokenizer.decode(said.ids, skip_special_tokens=True).rpartition("</think>")[2].strip()
        return best_scores(text if self._is_chat else text.partition(self._task.end)[0], case.answers)

    def _hear(self, sequences: Sequence[EngineSequence], logits: Tensor) -> Tensor:
        """Note distributions; leave no choice where an answer is given. logits [S, vocab]."""
        logits = logits.clone()
        for row, sequence in enumerate(sequences):
            said = self._said.get(sequence.request.request_id)
            if said is None:  # a document, which is computed for one of them
                continue
            index, logprobs = sequence.num_output, logits[row].float().log_softmax(-1)
            if said.text is None:
                said.logprobs[index:] = [logprobs]  # a step that is run again says it again
                continue
            wanted, full = said.text.ids[index], said.text.logprobs[index]
            said.kl[index:] = [max(float((full.exp() * (full - logprobs)).sum()), 0.0)]
            said.agrees[index:] = [int(logprobs.argmax()) == wanted]
            logits[row] = 0
            logits[row, wanted] = 1
        return logits


def _is_exact(blend: BlendOptions) -> bool:
    """Return whether all is computed anew: its prompts would be exact prefixes of those that reuse documents."""
    return blend.selector == "all" or blend.ratio == 1


def best_scores(said: str, answers: Sequence[str]) -> tuple[float, float]:
    """Return F1 of words and exact match with the answer that is closest, as SQuAD's evaluation has them."""
    words = _words(said)
    return max(_f1(words, _words(each)) for each in answers), max(float(words == _words(each)) for each in answers)


def _words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles."""
    kept = "".join(char for char in text.lower() if char not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def _f1(said: list[str], right: list[str]) -> float:
    if not said or not right:
        return float(said == right)
    num_common = (Counter(said) & Counter(right)).total()
    return 2 * num_common / (len(said) + len(right))
