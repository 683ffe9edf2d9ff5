"""Chats with tool calls, for sums and lookups, and answers from their results."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from models.training.templates import CITIES, NAMES, Call, Turn

Value = str | int
Drawn = tuple[tuple[Value, ...], Value]  # arguments of a call, and its result
Draw = Callable[[Random, list[str]], Drawn]
PLACES = (
    *CITIES, "Vienna", "Athens", "Dublin", "Lisbon", "Prague", "Warsaw", "Helsinki", "London",
    "Boston", "Chicago", "Sydney", "Nairobi", "Seoul", "Hanoi", "Quito", "Havana",
)  # fmt: skip
PEOPLE = (
    *NAMES, "Karl", "Lena", "Max", "Nina", "Oscar", "Paula", "Quinn", "Rosa", "Sam", "Tina",
    "Ursula", "Victor", "Wanda", "Xenia", "Yusuf", "Zoe", "Alice", "Ben", "Clara", "Dora",
)  # fmt: skip
LANGUAGES = ("French", "German", "Italian", "Spanish", "Dutch", "Polish", "Greek", "Danish")
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear")
STATES = ("shipped", "delivered", "waiting", "cancelled", "packed", "paid", "returned")


@dataclass(frozen=True)
class Kind:
    """A kind of tool, with several spellings of its names and several questions.

    `draw` returns the arguments in the order of `parameters` and the tool's result; questions and
    answer name the arguments by position and the result as `{result}`.
    """

    names: tuple[str, ...]
    description: str
    parameters: tuple[tuple[str, ...], ...]
    questions: tuple[str, ...]
    answer: str
    draw: Draw


@dataclass(frozen=True)
class Tool:
    """One spelling of a kind, as a client offers it."""

    kind: Kind
    name: str
    parameters: tuple[str, ...]


def large_number(rng: Random) -> int:
    """Return a number of one to four digits, so that most sums are beyond the model itself."""
    return rng.randrange(10 ** rng.randint(1, 4))


def sums(compute: Callable[[int, int], int]) -> Draw:
    """Return a `draw` of two numbers and their result."""

    def draw(rng: Random, words: list[str]) -> Drawn:
        left, right = large_number(rng), large_number(rng)
        return (left, right), compute(left, right)

    return draw


def expression(rng: Random, words: list[str]) -> Drawn:
    """Draw a sum as one text."""
    left, right, symbol = large_number(rng), large_number(rng), rng.choice("+-*")
    result = {"+": left + right, "-": left - right, "*": left * right}[symbol]
    return (f"{left} {symbol} {right}",), result


def found(values: tuple[str, ...], result: Callable[[Random], Value]) -> Draw:
    """Return a `draw` of one of `values` and of its result."""
    return lambda rng, words: ((rng.choice(values),), result(rng))


def weather(rng: Random) -> str:
    """Return a sky and a temperature."""
    return f"{rng.choice(SKIES)}, {rng.randrange(-9, 40)} degrees"


def clock(rng: Random) -> str:
    """Return a time of day."""
    return f"{rng.randrange(24):02}:{rng.randrange(60):02}"


def phrase(rng: Random, words: list[str]) -> str:
    """Return one to three words."""
    return " ".join(rng.choices(words, k=rng.randint(1, 3)))


NUMBERS = (("a", "x", "left", "first"), ("b", "y", "right", "second"))
CITY = (("city", "location", "place"),)
PERSON = (("name", "person", "user"),)
KINDS: dict[str, Kind] = {
    "add": Kind(
        ("add", "sum", "add_numbers"), "Adds two numbers.", NUMBERS,
        ("What is {0} + {1}?", "{0} + {1}", "{0}+{1}", "Add {0} and {1}.", "What is {0} plus {1}?"),
        "{0} + {1} = {result}", sums(lambda left, right: left + right)),
    "subtract": Kind(
        ("subtract", "minus", "difference"), "Subtracts the second number from the first.", NUMBERS,
        ("What is {0} - {1}?", "{0} - {1}", "{0}-{1}", "What is {0} minus {1}?"),
        "{0} - {1} = {result}", sums(lambda left, right: left - right)),
    "multiply": Kind(
        ("multiply", "times", "product"), "Multiplies two numbers.", NUMBERS,
        ("What is {0} * {1}?", "{0} * {1}", "{0}*{1}", "Multiply {0} by {1}.",
         "What is {0} times {1}?"),
        "{0} * {1} = {result}", sums(lambda left, right: left * right)),
    "calculate": Kind(
        ("calculate", "calculator", "compute", "evaluate"), "Computes an expression.",
        (("expression", "formula", "input"),),
        ("What is {0}?", "{0}", "Calculate {0}", "Compute {0}.", "How much is {0}?"),
        "{0} = {result}", expression),
    "weather": Kind(
        ("get_weather", "weather", "current_weather", "get_current_weather"),
        "Returns the weather in a city.", CITY,
        ("How is the weather in {0}?", "What is the weather in {0}?", "Weather in {0}",
         "What's the weather like in {0}?", "Is it cold in {0}?", "How warm is it in {0}?"),
        "The weather in {0}: {result}.", found(PLACES, weather)),
    "time": Kind(
        ("get_time", "time", "current_time"), "Returns the time in a city.", CITY,
        ("What time is it in {0}?", "How late is it in {0}?", "Time in {0}",
         "What is the time in {0}?"),
        "It is {result} in {0}.", found(PLACES, clock)),
    "population": Kind(
        ("get_population", "population", "count_people"), "Returns how many people live in a city.",
        CITY,
        ("How many people live in {0}?", "What is the population of {0}?", "Population of {0}",
         "How big is {0}?"),
        "{result} people live in {0}.",
        found(PLACES, lambda rng: rng.randrange(10**5, 10**7))),
    "email": Kind(
        ("get_email", "find_email", "email"), "Returns the address of a person.", PERSON,
        ("What is the email of {0}?", "Email of {0}", "How can I write to {0}?",
         "Find the address of {0}."),
        "The address of {0} is {result}.",
        found(PEOPLE, lambda rng: f"{rng.choice(PEOPLE).lower()}{rng.randrange(100)}@example.com")),
    "age": Kind(
        ("get_age", "age", "find_age"), "Returns the age of a person.", PERSON,
        ("How old is {0}?", "What is the age of {0}?", "Age of {0}"),
        "{0} is {result} years old.", found(PEOPLE, lambda rng: rng.randrange(10, 99))),
    "order": Kind(
        ("get_order", "order_status", "find_order"), "Returns the state of an order.",
        (("order_id", "order", "number"),),
        ("Where is order {0}?", "What is the state of order {0}?", "Status of order {0}",
         "Was order {0} sent?"),
        "Order {0} is {result}.",
        lambda rng, words: ((large_number(rng),), rng.choice(STATES))),
    "search": Kind(
        ("search", "web_search", "find"), "Searches for a text.", (("query", "text", "q"),),
        ("Search for {0}.", "Find {0}", "Look for {0}", "search {0}"),
        "I found {result} pages about {0}.",
        lambda rng, words: ((phrase(rng, words),), rng.randrange(1000))),
    "translate": Kind(
        ("translate", "translate_text", "get_translation"), "Translates a text.",
        (("text", "word"), ("language", "to", "target")),
        ("Translate {0} to {1}.", "What is {0} in {1}?", "How do you say {0} in {1}?"),
        "{0} is {result} in {1}.",
        lambda rng, words: ((rng.choice(words), rng.choice(LANGUAGES)), rng.choice(words))),
    "message": Kind(
        ("send_message", "send", "write_to"), "Sends a text to a person.",
        (("to", "name", "person"), ("text", "message")),
        ("Send {0} the message {1}.", "Tell {0}: {1}", "Write to {0}: {1}"),
        "I wrote to {0}: {1}",
        lambda rng, words: ((rng.choice(PEOPLE), phrase(rng, words)), rng.choice(("ok", "sent")))),
    "timer": Kind(
        ("set_timer", "timer", "start_timer"), "Starts a timer.", (("minutes", "duration"),),
        ("Set a timer for {0} minutes.", "Start a timer of {0} minutes", "Timer: {0} minutes"),
        "The timer runs for {0} minutes.",
        lambda rng, words: ((rng.randrange(1, 100),), rng.choice(("ok", "started")))),
}  # fmt: skip
SUMS = ("add", "subtract", "multiply", "calculate")


def spelled(rng: Random, kind: Kind) -> Tool:
    """Give a kind one of its names, and its parameters theirs: a and b, never a and y."""
    which = rng.randrange(12)
    parameters = tuple(names[which % len(names)] for names in kind.parameters)
    return Tool(kind, rng.choice(kind.names), parameters)


def ask(tool: Tool, rng: Random, words: list[str]) -> Turn:
    """Ask for one call of a tool, or now and then for two; `partial(ask, tool)` is a template."""
    kind = tool.kind
    drawn = [kind.draw(rng, words)]
    form = rng.choice(kind.questions)
    question = form.format(*drawn[0][0])
    if len(kind.parameters) == 1 and " in {0}?" in form and rng.random() < 0.15:
        drawn.append(kind.draw(rng, words))
        question = form.format(f"{drawn[0][0][0]} and {drawn[1][0][0]}")
    calls, responses, answers = [], [], []
    for values, result in drawn:
        calls.append(Call(tool.name, dict(zip(tool.parameters, values, strict=True))))
        responses.append(rng.choice((str(result), str(result), json.dumps({"result": result}))))
        answers.append(kind.answer.format(*values, result=result))
    return Turn(
        f"{kind.names[0]}: {question}", question, " ".join(answers), tuple(calls), tuple(responses)
    )


def schema(rng: Random, tool: Tool, words: list[str], turns: list[Turn]) -> dict[str, Any]:
    """Return a client's definition of a tool, occasionally with an enumeration of the places."""
    called = [call for turn in turns for call in turn.calls if call.name == tool.name]
    properties: dict[str, Any] = {}
    values, _ = tool.kind.draw(rng, words)
    for name, value in zip(tool.parameters, values, strict=True):
        is_text = isinstance(value, str)
        properties[name] = {"type": "string" if is_text else rng.choice(("integer", "number"))}
        if value in PLACES and rng.random() < 0.2:
            listed = {str(value), *(str(call.arguments[name]) for call in called)}
            properties[name]["enum"] = sorted(listed)
    function: dict[str, Any] = {"name": tool.name}
    if rng.random() < 0.7:
        function["description"] = tool.kind.description
    required = list(properties)
    function["parameters"] = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": function}


def offer(rng: Random) -> list[Tool]:
    """Draw one to three tools with names of their own, at most one of them for sums."""
    names = rng.sample(list(KINDS), rng.choice((1, 1, 2, 3)))
    for_sums = [name for name in names if name in SUMS]
    tools = [spelled(rng, KINDS[name]) for name in names if name not in for_sums[1:]]
    return list({tool.name: tool for tool in tools}.values())
