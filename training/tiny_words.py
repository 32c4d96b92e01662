"""The closed word lists of the generated tasks; the tokenizer makes each name and value one token."""

# ruff: noqa: SIM905
WOMEN = (
    "Alice Anna Carol Clara Diana Ella Emma Grace Helen Jane Julia Laura Maria Nora Olivia Rosa Sara Tina Vera Wendy"
).split()
MEN = (
    "Bob Carl David Eric Frank George Henry Ivan Jack Kevin Leo Mark Nick Oscar Paul Peter Robert Sam Tom Victor"
).split()
NAMES = WOMEN + MEN

FOODS = (
    "tea coffee milk bread cheese honey apples soup rice fish cake juice lemons pears plums salad pasta corn beans nuts"
).split()
GAMES = (
    "chess tennis piano guitar cards golf drums football violin flute "
    "darts poker hockey rugby cello harp trumpet squash snooker bowls"
).split()
VALUES_BY_VERB = {"likes": FOODS, "plays": GAMES}
BASE_FORM = {"likes": "like", "plays": "play"}

COLOURS = "red blue green yellow black white brown grey pink purple".split()
ANIMALS = "cat dog horse bird rabbit mouse sheep goat duck frog".split()
NUMBERS = "one two three four five six seven eight nine ten".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = ("January February March April May June July August September October November December").split()
PLACES = "river road house garden town hill market school forest bridge".split()
SCENES = (
    "The rain fell on the {}.|It was quiet near the {}.|The sun was over the {}.|A bird sang by the {}."
    "|The wind came from the {}.|There was snow on the {}.|The light at the {} was low."
    "|A bell rang in the {}."
).split("|")


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
