"""The closed word lists of the generated tasks; the tokenizer makes each name and value one token."""

# ruff: noqa: SIM905
from mneme.lab.quality.coreference import BASE_FORM, FOODS, GAMES, MEN, PLACES, VALUES_BY_VERB, WOMEN

NAMES = WOMEN + MEN

COLOURS = "red blue green yellow black white brown grey pink purple".split()
ANIMALS = "cat dog horse bird rabbit mouse sheep goat duck frog".split()
NUMBERS = "one two three four five six seven eight nine ten".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = ("January February March April May June July August September October November December").split()


def words() -> list[str]:
    """Every word that must be a single token after a space."""
    verbs = [*VALUES_BY_VERB, *BASE_FORM.values(), "Now", "She", "He"]
    return NAMES + FOODS + GAMES + COLOURS + ANIMALS + NUMBERS + DAYS + MONTHS + PLACES + verbs


def line_starts() -> list[str]:
    """Every word that must be a single token at the start of a line."""
    return [
        *NAMES,
        "Now",
        "She",
        "He",
        "The",
        "It",
        "There",
        "Question",
        "Answer",
        "system",
        "user",
        "assistant",
    ]
