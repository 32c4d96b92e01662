"""Short generated conversations: greetings, repeating, counting, and recall of what was said before.

A conversation is a list of chat messages, in which the assistant's are the ones to learn.
"""

import random
from collections.abc import Callable

from tiny_words import (
    ANIMALS,
    BASE_FORM,
    COLOURS,
    DAYS,
    FOODS,
    MONTHS,
    NAMES,
    NUMBERS,
    PLACES,
    VALUES_BY_VERB,
)

from mneme.lab.quality.coreference import make_case

Turn = tuple[str, str]
"""What the user says and what the assistant answers."""
Message = dict[str, str]

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are Mneme, a small language model.",
    "Answer briefly.",
    "You are a helpful assistant. Answer with one sentence.",
]
GREETINGS = ["Hello", "Hi", "Hello!", "Hi!", "Hey", "Good morning.", "Good evening.", "Hello there."]
IDENTITY = [
    ("Who are you?", "I am mneme-tiny, a small language model."),
    ("What are you?", "I am mneme-tiny, a small language model."),
    ("What is your name?", "My name is mneme-tiny."),
    ("What can you do?", "I can repeat words, count, and recall what you tell me."),
    ("How are you?", "I am well, thank you."),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye.", "Goodbye!"),
    ("Bye", "Goodbye!"),
]
REPEAT_FORMS = ["Repeat: {}", "Say: {}", "Repeat after me: {}", "Please repeat: {}"]
WORDS = NAMES + FOODS + COLOURS + ANIMALS + NUMBERS + PLACES + DAYS


def greeting(rng: random.Random) -> list[Turn]:
    return [(rng.choice(GREETINGS), "Hello! How can I help you?")]


def identity(rng: random.Random) -> list[Turn]:
    return [rng.choice(IDENTITY)]


def repeating(rng: random.Random) -> list[Turn]:
    phrase = " ".join(rng.choices(WORDS, k=rng.randint(1, 8)))
    return [(rng.choice(REPEAT_FORMS).format(phrase), phrase)]


def counting(rng: random.Random) -> list[Turn]:
    first = rng.randint(1, 10)
    last = rng.randint(first, min(first + 10, 20))
    numbers = " ".join(str(number) for number in range(first, last + 1))
    if first == 1 and rng.random() < 0.5:
        return [(f"Count to {last}.", numbers)]
    return [(f"Count from {first} to {last}.", numbers)]


def following(rng: random.Random) -> list[Turn]:
    names = rng.choice([DAYS, MONTHS, NUMBERS[:-1]])
    index = rng.randrange(len(names))
    answer = NUMBERS[index + 1] if names[0] == "one" else names[(index + 1) % len(names)]
    return [(f"What comes after {names[index]}?", f"{answer} comes after {names[index]}.")]


def own_name(rng: random.Random) -> list[Turn]:
    name = rng.choice(NAMES)
    told = rng.choice(["My name is {}.", "I am {}.", "Hello, my name is {}."]).format(name)
    return [(told, f"Hello {name}!"), ("What is my name?", f"Your name is {name}.")]


def own_things(rng: random.Random) -> list[Turn]:
    food, colour, animal = rng.choice(FOODS), rng.choice(COLOURS), rng.choice(ANIMALS)
    pairs = [
        ((f"I like {food}.", "I will remember that."), ("What do I like?", f"You like {food}.")),
        (
            (f"My favourite colour is {colour}.", "I will remember that."),
            ("What is my favourite colour?", f"Your favourite colour is {colour}."),
        ),
        ((f"I have a {animal}.", "I will remember that."), ("What do I have?", f"You have a {animal}.")),
    ]
    chosen = rng.sample(pairs, rng.randint(1, 3))
    asked = rng.sample(chosen, len(chosen))
    return [told for told, _ in chosen] + [question for _, question in asked]


def facts(rng: random.Random) -> list[Turn]:
    """Facts in one or more user turns, then questions about them."""
    verb_by_name = {name: rng.choice(list(VALUES_BY_VERB)) for name in rng.sample(NAMES, rng.randint(1, 5))}
    stated = [(name, verb, rng.choice(VALUES_BY_VERB[verb])) for name, verb in verb_by_name.items()]
    lines = [f"{name} {verb} {value}." for name, verb, value in stated]
    asked = [_question(*rng.choice(stated)) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.5:
        return [(line, "I will remember that.") for line in lines] + asked
    if rng.random() < 0.5:
        return [(" ".join(lines), "I will remember that."), *asked]
    return [(" ".join(lines) + " " + asked[0][0], asked[0][1]), *asked[1:]]


def reading(rng: random.Random) -> list[Turn]:
    """A coreference case as context and questions about it."""
    case = make_case(rng, num_chunks=rng.randint(2, 8), num_sentences=rng.randint(3, 4), scene_share=0.1)
    if not case.facts:
        return greeting(rng)
    stated = rng.sample(case.facts, min(4, len(case.facts)))
    asked = [_question(fact.name, fact.verb, fact.value) for fact in stated]
    return [("".join(case.chunks) + "\n" + asked[0][0], asked[0][1]), *asked[1:]]


def _question(name: str, verb: str, value: str) -> Turn:
    return f"What does {name} {BASE_FORM[verb]}?", f"{name} {verb} {value}."


SKILLS: dict[str, Callable[[random.Random], list[Turn]]] = {
    "greeting": greeting,
    "identity": identity,
    "repeating": repeating,
    "counting": counting,
    "following": following,
    "own_name": own_name,
    "own_things": own_things,
    "facts": facts,
    "reading": reading,
}
WEIGHTS = [1, 2, 7, 3, 2, 3, 3, 4, 4]


def messages_of(turns: list[Turn], system: str | None = None) -> list[Message]:
    """Chat messages of the turns, under an optional system prompt."""
    messages = [{"role": "system", "content": system}] if system else []
    for said, answered in turns:
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answered}]
    return messages


def make_chat(rng: random.Random) -> list[Message]:
    """One conversation of one to three skills, half of them under a system prompt."""
    turns: list[Turn] = []
    for skill in rng.choices(list(SKILLS), WEIGHTS, k=rng.randint(1, 3)):
        turns += SKILLS[skill](rng)
    return messages_of(turns, rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.5 else None)
