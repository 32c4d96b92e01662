"""The cross-chunk pronoun task: facts about "she" whose subject was named in an earlier chunk.

A case is a list of chunks of short sentences. "Now Alice." sets the topic, "She likes tea." states a fact
about it, "Emma plays chess." states a fact about somebody else. A question asks for one fact. Kinds:
`explicit` (subject in the sentence), `local` (pronoun, topic set in the same chunk), `px` (pronoun, topic
set in an earlier chunk: the chunk alone cannot answer). Every (name, verb) is stated at most once and all
people of a case are women or all are men, so neither repetition nor gender gives the answer away.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

# The tokenizer of mneme-tiny makes each name and value one token.
# ruff: noqa: SIM905
WOMEN = (
    "Alice Anna Carol Clara Diana Ella Emma Grace Helen Jane Julia Laura Maria Nora Olivia Rosa Sara Tina Vera Wendy"
).split()
MEN = (
    "Bob Carl David Eric Frank George Henry Ivan Jack Kevin Leo Mark Nick Oscar Paul Peter Robert Sam Tom Victor"
).split()
FOODS = (
    "tea coffee milk bread cheese honey apples soup rice fish cake juice lemons pears plums salad pasta corn beans nuts"
).split()
GAMES = (
    "chess tennis piano guitar cards golf drums football violin flute "
    "darts poker hockey rugby cello harp trumpet squash snooker bowls"
).split()
VALUES_BY_VERB = {"likes": FOODS, "plays": GAMES}
BASE_FORM = {"likes": "like", "plays": "play"}
PLACES = "river road house garden town hill market school forest bridge".split()
SCENES = (
    "The rain fell on the {}.|It was quiet near the {}.|The sun was over the {}.|A bird sang by the {}."
    "|The wind came from the {}.|There was snow on the {}.|The light at the {} was low."
    "|A bell rang in the {}."
).split("|")

TOPIC_SHARE = 0.28
PRONOUN_SHARE = 0.68


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One stated fact; chunk numbers count from the start of the case."""

    name: str
    verb: str
    value: str
    chunk: int
    topic_chunk: int | None  # where the pronoun's topic was set; None for an explicit fact

    @property
    def kind(self) -> str:
        if self.topic_chunk is None:
            return "explicit"
        return "local" if self.topic_chunk == self.chunk else "px"

    @property
    def question(self) -> str:
        """Ends right before the single answer token."""
        return f"\nQuestion: What does {self.name} {BASE_FORM[self.verb]}?\nAnswer: {self.name} {self.verb}"

    @property
    def answer(self) -> str:
        return f" {self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Texts to be encoded one by one, and the facts that they state."""

    chunks: list[str]
    facts: list[Fact]

    def of_kind(self, kind: str) -> list[Fact]:
        return [fact for fact in self.facts if fact.kind == kind]


@dataclass(slots=True)
class _Story:
    """The sentences of one case while it is written."""

    rng: random.Random
    pronoun: str
    free: dict[str, list[str]]  # verbs not yet stated, by name
    values: dict[str, list[str]]
    topic: str | None = None
    topic_chunk: int = 0
    facts: list[Fact] = field(default_factory=list)

    def sentence(self, chunk: int) -> str:
        """Write the next sentence, chosen so that every (name, verb) stays unique."""
        idle = [name for name, verbs in self.free.items() if verbs and name != self.topic]
        topic = self.topic if self.topic is not None and self.free[self.topic] else None
        roll = self.rng.random()
        if idle and (self.topic is None or roll < TOPIC_SHARE or (topic is None and roll < 0.6)):
            return self._new_topic(self.rng.choice(idle), chunk)
        if topic is not None and roll < TOPIC_SHARE + PRONOUN_SHARE * (1 - TOPIC_SHARE):
            return self._state(topic, self.pronoun, chunk, self.topic_chunk)
        if idle:
            name = self.rng.choice(idle)
            return self._state(name, name, chunk, None)
        return scene(self.rng)

    def _new_topic(self, name: str, chunk: int) -> str:
        self.topic, self.topic_chunk = name, chunk
        return f"Now {name}."

    def _state(self, name: str, subject: str, chunk: int, topic_chunk: int | None) -> str:
        verb = self.free[name].pop()
        value = self.values[verb].pop()
        self.facts.append(Fact(name=name, verb=verb, value=value, chunk=chunk, topic_chunk=topic_chunk))
        return f"{subject} {verb} {value}."


def scene(rng: random.Random) -> str:
    """Write a sentence that states no fact about anybody."""
    return rng.choice(SCENES).format(rng.choice(PLACES))


def make_case(rng: random.Random, *, num_chunks: int, num_sentences: int, scene_share: float = 0.0) -> Case:
    """Make a case of `num_chunks` chunks of `num_sentences` sentences each.

    Every sentence begins with its space: chunks side by side are running text, and a word is the same token wherever it
    stands.
    """
    names, pronoun = rng.choice([(WOMEN, "She"), (MEN, "He")])
    shuffled = {verb: rng.sample(values, len(values)) for verb, values in VALUES_BY_VERB.items()}
    free = {name: rng.sample(list(shuffled), len(shuffled)) for name in names}
    story = _Story(rng, pronoun, free, shuffled)
    chunks = []
    for chunk in range(num_chunks):
        lines = [scene(rng) if rng.random() < scene_share else story.sentence(chunk) for _ in range(num_sentences)]
        chunks.append("".join(f" {line}" for line in lines))
    return Case(chunks=chunks, facts=story.facts)


def px_cases(
    seed: int, *, num_cases: int, num_chunks: int, num_sentences: int, scene_share: float = 0.0
) -> Iterator[tuple[Case, Fact]]:
    """Ask one px question in each of `num_cases` independent cases."""
    rng = random.Random(seed)
    for _ in range(num_cases):
        facts: list[Fact] = []
        while not facts:
            case = make_case(rng, num_chunks=num_chunks, num_sentences=num_sentences, scene_share=scene_share)
            facts = case.of_kind("px")
        yield case, rng.choice(facts)
