"""Questions of many kinds, each with exactly one right answer."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from models.training.corpus import stable_hash
from models.training.shoal_facts import (
    FACTS,
    UNKNOWN_ANSWER,
    UNKNOWN_QUESTIONS,
    UNKNOWN_SUBJECTS,
)

HELD_OUT_ONE_IN = 20
NAMES = ("Ada", "Bob", "Carla", "David", "Emma", "Frank", "Grace", "Hugo", "Ida", "Jonas")
CITIES = ("Paris", "Berlin", "Rome", "Oslo", "Lima", "Cairo", "Tokyo", "Madrid", "Delhi", "Bern")


@dataclass(frozen=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: dict[str, str | int]


@dataclass(frozen=True)
class Turn:
    """One question with its only right answer; `key` names the item for the held-out split.

    With `calls` the model makes these first, and answers after it has read their `responses`.
    """

    key: str
    question: str
    answer: str
    calls: tuple[Call, ...] = ()
    responses: tuple[str, ...] = ()


Template = Callable[[Random, list[str]], Turn]


def arithmetic(rng: Random, symbol: str, left: int, right: int, result: int) -> Turn:
    """Return one sum in one of several phrasings; the answer repeats the sum."""
    word = {"+": "plus", "-": "minus", "*": "times"}[symbol]
    forms = (
        f"What is {left} {symbol} {right}?",
        f"{left} {symbol} {right}",
        f"{left}{symbol}{right}",
        f"{left} {symbol} {right} =",
        f"Compute {left} {symbol} {right}.",
        f"What is {left} {word} {right}?",
        f"How much is {left} {word} {right}?",
        f"Calculate {left} {symbol} {right}",
    )
    return Turn(f"{left}{symbol}{right}", rng.choice(forms), f"{left} {symbol} {right} = {result}")


def operand(rng: Random) -> int:
    """Return a number below 100; one-digit numbers are as frequent as two-digit ones."""
    return rng.randrange(10) if rng.random() < 0.35 else rng.randrange(100)


def addition(rng: Random, words: list[str]) -> Turn:
    """Add two numbers below 100."""
    left, right = operand(rng), operand(rng)
    return arithmetic(rng, "+", left, right, left + right)


def subtraction(rng: Random, words: list[str]) -> Turn:
    """Subtract two numbers below 100; the result may be negative."""
    left, right = operand(rng), operand(rng)
    return arithmetic(rng, "-", left, right, left - right)


def multiplication(rng: Random, words: list[str]) -> Turn:
    """Multiply a digit by a number below 100, mostly from the small table."""
    left, right = rng.randrange(11), rng.randrange(11) if rng.random() < 0.6 else rng.randrange(100)
    return arithmetic(rng, "*", left, right, left * right)


def comparison(rng: Random, words: list[str]) -> Turn:
    """Say which of two different numbers is larger or smaller."""
    left, right = rng.sample(range(100), 2)
    larger = rng.random() < 0.5
    name = rng.choice(("larger", "bigger") if larger else ("smaller", "less"))
    answer = str(max(left, right) if larger else min(left, right))
    return Turn(f"{left}?{right}", f"Which is {name}, {left} or {right}?", answer)


def counting(rng: Random, words: list[str]) -> Turn:
    """Count upwards or downwards over at most a dozen numbers."""
    first = rng.randrange(90)
    last = first + rng.randrange(2, 12)
    if rng.random() < 0.25:
        first, last = last, first
    step = 1 if last > first else -1
    answer = ", ".join(str(number) for number in range(first, last + step, step))
    form = rng.choice(("Count from {} to {}.", "Count from {} to {}", "count {} to {}"))
    return Turn(f"{first}..{last}", form.format(first, last), answer)


def spelling(rng: Random, words: list[str]) -> Turn:
    """Spell a word letter by letter."""
    word = rng.choice(words)
    forms = (f"Spell {word}.", f"Spell the word {word}.", f"How do you spell {word}?",
             f'Spell "{word}"', f"Please spell {word} letter by letter.")  # fmt: skip
    return Turn(f"spell {word}", rng.choice(forms), "-".join(word))


def number_sorting(rng: Random, words: list[str]) -> Turn:
    """Sort three or four numbers."""
    numbers = rng.sample(range(100), rng.randint(3, 4))
    listed = ", ".join(map(str, numbers))
    form = rng.choice(("Sort these numbers: {}", "Sort {}.", "Put {} in order.", "sort: {}"))
    return Turn(listed, form.format(listed), ", ".join(map(str, sorted(numbers))))


def word_sorting(rng: Random, words: list[str]) -> Turn:
    """Sort three words with different first letters."""
    by_letter = {word[0]: word for word in rng.sample(words, 8)}
    chosen = list(by_letter.values())[:3]
    listed = ", ".join(chosen)
    form = rng.choice(("Sort these words: {}", "Sort {}.", "Put {} in alphabetical order."))
    return Turn(listed, form.format(listed), ", ".join(sorted(chosen)))


def json_object(rng: Random, words: list[str]) -> Turn:
    """Write the given fields as a JSON object."""
    fields: dict[str, str | int] = {}
    for field in rng.sample(("name", "age", "city", "count", "color", "price"), rng.randint(1, 4)):
        choices: dict[str, tuple[str, ...]] = {"name": NAMES, "city": CITIES}
        is_number = field in ("age", "count", "price")
        fields[field] = rng.randrange(100) if is_number else rng.choice(choices.get(field, words))
    listed = ", ".join(f"{name} {value}" for name, value in fields.items())
    form = rng.choice(("Write a JSON object with {}.", "Make JSON: {}", "As JSON: {}",
                       "Give me a JSON object with {}"))  # fmt: skip
    return Turn(listed, form.format(listed), json.dumps(fields))


def record(rng: Random, words: list[str]) -> Turn:
    """Write the facts of a sentence about a person as a JSON object."""
    name, age, city = rng.choice(NAMES), rng.randrange(100), rng.choice(CITIES)
    form = rng.choice(("{} is {} and lives in {}.", "{}, {}, from {}", "{} ({}) lives in {}.",
                       "My name is {}, I am {} years old and live in {}."))  # fmt: skip
    sentence = form.format(name, age, city)
    asked = rng.choice(("Extract the data: {}", "As JSON: {}", "{} Write that as JSON.", "{}"))
    answer = json.dumps({"name": name, "age": age, "city": city})
    return Turn(f"{name} {age} {city}", asked.format(sentence), answer)


def function(rng: Random, words: list[str]) -> Turn:
    """Write a one-line Python function."""
    name, left, right = rng.sample(words, 3)
    kind, body = rng.choice((("sum", "{} + {}"), ("difference", "{} - {}"), ("product", "{} * {}"),
                             ("maximum", "max({}, {})"), ("minimum", "min({}, {})")))  # fmt: skip
    question = f"Write a Python function {name} that returns the {kind} of {left} and {right}."
    answer = f"def {name}({left}, {right}):\n    return {body.format(left, right)}"
    return Turn(question, question, answer)


def vary(rng: Random, text: str) -> str:
    """Change the case, the ending or the opening of a question a little."""
    if rng.random() < 0.5:
        text = text[0].upper() + text[1:]
    if rng.random() < 0.2:
        text = text.rstrip("?.")
    opening = rng.choice(("Please: ", "Hi, ", "Hello! ", "So, "))
    return opening + text if rng.random() < 0.15 else text


def fact(rng: Random, words: list[str]) -> Turn:
    """Ask about Shoal or the model itself."""
    questions, answer = FACTS[rng.choice(list(FACTS))]
    question = vary(rng, rng.choice(questions))
    return Turn(question, question, answer)


def unknown(rng: Random, words: list[str]) -> Turn:
    """Ask something the model was never taught; it says so."""
    question = vary(rng, rng.choice(UNKNOWN_QUESTIONS).format(rng.choice(UNKNOWN_SUBJECTS)))
    return Turn(question, question, UNKNOWN_ANSWER)


TEMPLATES: dict[str, tuple[Template, float]] = {
    "addition": (addition, 3.5), "subtraction": (subtraction, 2.5),
    "multiplication": (multiplication, 1.5), "comparison": (comparison, 0.5),
    "counting": (counting, 0.6), "spelling": (spelling, 3.0),
    "number_sorting": (number_sorting, 2.0), "word_sorting": (word_sorting, 1.5),
    "json_object": (json_object, 2.0), "record": (record, 1.0), "function": (function, 0.6),
    "fact": (fact, 1.0), "unknown": (unknown, 0.4),
}  # fmt: skip


def draw_turn(rng: Random, template: Template, words: list[str], held_out: bool) -> Turn:
    """Draw until an item of the wanted side of the split comes up."""
    while True:
        turn = template(rng, words)
        if (stable_hash(turn.key) % HELD_OUT_ONE_IN == 0) == held_out:
            return turn
