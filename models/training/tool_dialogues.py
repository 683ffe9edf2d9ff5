"""A seeded generator of short chats with tools: when to call which, and what to say of results.

A chat is rendered as `chat_template.jinja` renders it: tools in the system message, calls in an
assistant's message, results in a user's.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from models.training.corpus import stable_hash
from models.training.turns import HELD_OUT_ONE_IN, TEMPLATES, Message, draw_turn
from models.training.values import CITIES, NAMES, THINGS, identifier, invented, proper

JsonObject = dict[str, Any]
SYSTEM_MESSAGES = ("You are a helpful assistant.", "Use the tools.", "Answer briefly.")
TEXT_BEFORE_TOOLS = "# Tools\n\nThese functions can be called:\n<tools>"
TEXT_BEHIND_TOOLS = (
    "\n</tools>\n\nA call is written like this:\n"
    '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
)
OPERATIONS = {
    "+": (("add", "sum", "plus", "add_numbers", "addition"), "Add two numbers."),
    "-": (("subtract", "minus", "difference", "subtract_numbers"), "Subtract two numbers."),
    "*": (("multiply", "times", "product", "multiply_numbers"), "Multiply two numbers."),
}
OPERANDS = (("a", "b"), ("x", "y"), ("left", "right"), ("first", "second"), ("num1", "num2"))
WEATHERS = ("sunny", "rain", "snow", "cloudy", "wind", "fog", "storms", "warm and dry")
SUBJECTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "city": (("city", "location", "place", "town"), CITIES),
    "person": (("name", "person", "user"), NAMES),
    "thing": (("item", "product", "name"), THINGS),
}
LOOKUPS = (
    ("weather", "city"), ("weather", "city"), ("time", "city"), ("temperature", "city"),
    ("population", "city"), ("age", "person"), ("phone number", "person"), ("address", "person"),
    ("email", "person"), ("price", "thing"), ("color", "thing"), ("size", "thing"),
    ("stock", "thing"),
)  # fmt: skip


@dataclass(frozen=True)
class Tool:
    """One function and its parameters, name by name with their JSON types."""

    name: str
    description: str
    parameters: dict[str, str]


@dataclass(frozen=True)
class Exchange:
    """What is asked, the calls that it takes, their results and the answer."""

    question: str
    calls: list[tuple[str, JsonObject]]
    results: list[str]
    answer: str


def tool_entry(rng: Random, tool: Tool) -> JsonObject:
    """Return a tool as one of the usual clients sends it."""
    describes = rng.random() < 0.3
    properties = {
        name: {"type": kind} | ({"description": f"The {name}."} if describes else {})
        for name, kind in tool.parameters.items()
    }
    required = {"required": list(tool.parameters)}
    if rng.random() < 0.5:
        parameters = {"type": "object", "properties": properties} | required
    else:
        parameters = {"properties": properties} | required | {"type": "object"}
    if rng.random() < 0.2:
        parameters["additionalProperties"] = False
    entry = {"name": tool.name, "description": tool.description, "parameters": parameters}
    if rng.random() < 0.15:
        del entry["description"]
    return {"type": "function", "function": entry}


def tools_message(rng: Random, tools: list[Tool]) -> Message:
    """Return the system message that names the tools."""
    opening = rng.choice(SYSTEM_MESSAGES) + "\n\n" if rng.random() < 0.3 else ""
    entries = (json.dumps(tool_entry(rng, tool), ensure_ascii=False) for tool in tools)
    listed = "".join(f"\n{entry}" for entry in entries)
    return Message("system", opening + TEXT_BEFORE_TOOLS + listed + TEXT_BEHIND_TOOLS)


def exchange_messages(exchange: Exchange) -> list[Message]:
    """Return the question, the calls, their results and the answer as messages."""
    calls = (
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in exchange.calls
    )
    results = (f"<tool_response>\n{result}\n</tool_response>" for result in exchange.results)
    messages = [Message("user", exchange.question)]
    if exchange.calls:
        messages += [Message("assistant", "\n".join(calls)), Message("user", "\n".join(results))]
    return [*messages, Message("assistant", exchange.answer)]


def sum_tool(rng: Random, symbol: str) -> Tool:
    """Return a tool that does one of the operations."""
    names, description = OPERATIONS[symbol]
    kind = rng.choice(("integer", "integer", "number"))
    return Tool(rng.choice(names), description, dict.fromkeys(rng.choice(OPERANDS), kind))


def sum_exchange(rng: Random, symbol: str, tool: Tool) -> Exchange:
    """Ask for one sum, in numbers too large to know by heart, too."""
    left, right = (rng.randrange(rng.choice((10, 100, 1000, 10_000))) for _ in range(2))
    result = {"+": left + right, "-": left - right, "*": left * right}[symbol]
    word = {"+": "plus", "-": "minus", "*": "times"}[symbol]
    forms = (
        f"What is {left} {symbol} {right}?", f"{left} {symbol} {right}",
        f"Compute {left} {symbol} {right}.", f"What is {left} {word} {right}?",
        f"How much is {left} {word} {right}?", f"What is {left} {symbol} {right}",
    )  # fmt: skip
    arguments = dict(zip(tool.parameters, (left, right), strict=True))
    shown = rng.choice((str(result), str(result), json.dumps({"result": result})))
    answer = f"{left} {symbol} {right} = {result}"
    return Exchange(rng.choice(forms), [(tool.name, arguments)], [shown], answer)


def lookup_tool(rng: Random, noun: str, kind: str) -> Tool:
    """Return a tool that looks one thing up."""
    word = noun.replace(" ", "_")
    forms = (f"get_{word}", f"get_{word}", f"get_current_{word}", f"lookup_{word}", f"find_{word}",
             f"{word}_of", word)  # fmt: skip
    parameter = rng.choice(SUBJECTS[kind][0])
    describe = rng.choice(("Get the {} of a {}.", "Look up the {} of a {}.", "The {} of a {}."))
    return Tool(rng.choice(forms), describe.format(noun, parameter), {parameter: "string"})


def looked_up(rng: Random, noun: str) -> str:
    """Return what a lookup finds."""
    if noun == "weather":
        return rng.choice(WEATHERS)
    if noun == "time":
        return f"{rng.randrange(24)}:{rng.randrange(60):02}"
    if noun in ("email", "address", "color", "size"):
        return invented(rng)
    return str(rng.randrange(rng.choice((10, 100, 10_000))))


def lookup_exchange(rng: Random, noun: str, kind: str, tool: Tool) -> Exchange:
    """Ask for one thing, or for the same of two."""
    (parameter,) = tool.parameters
    num_calls = 2 if rng.random() < 0.25 else 1
    subjects = [proper(rng, SUBJECTS[kind][1]) for _ in range(num_calls)]
    place = "in" if kind == "city" else "of"
    both = " and ".join(subjects)
    forms = (
        f"What is the {noun} {place} {both}?", f"What is the {noun} {place} {both}?",
        f"Tell me the {noun} {place} {both}.", f"What's the {noun} {place} {both}?",
        f"{noun} {place} {both}", f"I want to know the {noun} {place} {both}.",
        f"What is the {noun} like {place} {both}?", f"Give me the {noun} {place} {both}",
        f"What is the {noun} {place} {both}? Use the tool.",
    )  # fmt: skip
    results = [looked_up(rng, noun) for _ in subjects]
    shown = results
    if rng.random() < 0.25:
        shown = [json.dumps({noun.replace(" ", "_"): result}) for result in results]
    pairs = zip(subjects, results, strict=True)
    answer = " ".join(f"The {noun} {place} {subject} is {result}." for subject, result in pairs)
    calls: list[tuple[str, JsonObject]] = [(tool.name, {parameter: each}) for each in subjects]
    return Exchange(rng.choice(forms), calls, shown, answer)


def named_tool(rng: Random, words: list[str]) -> Tool:
    """Return a tool of any name with up to three parameters."""
    kinds = ("integer", "string", "string", "boolean", "number")
    names = {identifier(rng, words) for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3)))}
    parameters = {name: rng.choice(kinds) for name in sorted(names)}
    described = " ".join(rng.choice(words) for _ in range(rng.randint(2, 5)))
    return Tool(identifier(rng, words), described.capitalize() + ".", parameters)


def argument(rng: Random, kind: str, words: list[str]) -> Any:
    """Return a value of a JSON type."""
    match kind:
        case "integer":
            return rng.randrange(rng.choice((10, 100, 1000)))
        case "number":
            return rng.randrange(1000) / rng.choice((1, 10))
        case "boolean":
            return rng.random() < 0.5
    return rng.choice((rng.choice(words), invented(rng), proper(rng, NAMES)))


def named_exchange(rng: Random, tool: Tool, words: list[str]) -> Exchange:
    """Ask for a call by the tool's name and its arguments."""
    arguments = {name: argument(rng, kind, words) for name, kind in tool.parameters.items()}
    shown = [value if isinstance(value, str) else json.dumps(value) for value in arguments.values()]
    named = [f"{name} {text}" for name, text in zip(arguments, shown, strict=True)]
    assigned = [f"{name}={text}" for name, text in zip(arguments, shown, strict=True)]
    listed = f" with {' and '.join(named)}" if named else ""
    forms = (
        f"What is the value of {tool.name}({', '.join(shown)})? Use the tool.",
        f"What is {tool.name}({', '.join(shown)})?", f"Call {tool.name}{listed}.",
        f"Use {tool.name}{listed}.", f"Run {tool.name}({', '.join(assigned)})",
        f"Please use the {tool.name} tool{listed}.",
    )  # fmt: skip
    result = str(argument(rng, rng.choice(("integer", "string")), words))
    answer = f"{tool.name} returned {result}."
    return Exchange(rng.choice(forms), [(tool.name, arguments)], [result], answer)


Drawer = Callable[[], Exchange]


def use_sum(rng: Random, words: list[str]) -> tuple[Tool, Drawer]:
    """Return a tool for sums and what draws exchanges that need it."""
    symbol = rng.choice("+-*")
    tool = sum_tool(rng, symbol)
    return tool, lambda: sum_exchange(rng, symbol, tool)


def use_lookup(rng: Random, words: list[str]) -> tuple[Tool, Drawer]:
    """Return a tool that looks something up and what draws exchanges that need it."""
    noun, kind = rng.choice(LOOKUPS)
    tool = lookup_tool(rng, noun, kind)
    return tool, lambda: lookup_exchange(rng, noun, kind, tool)


def use_named(rng: Random, words: list[str]) -> tuple[Tool, Drawer]:
    """Return any tool and what draws exchanges that name it."""
    tool = named_tool(rng, words)
    return tool, lambda: named_exchange(rng, tool, words)


def need_none(rng: Random, words: list[str]) -> tuple[Tool, Drawer]:
    """Return a tool and what draws questions that are answered without it."""
    tool, _ = rng.choice((use_lookup, use_named))(rng, words)
    return tool, lambda: plain_exchange(rng, words)


def plain_exchange(rng: Random, words: list[str]) -> Exchange:
    """Ask what the model knows by itself."""
    template = rng.choice([each for name, (each, _) in TEMPLATES.items() if name != "unknown"])
    turn = draw_turn(rng, template, words, held_out=False)
    return Exchange(turn.question, [], [], turn.answer)


KINDS = {"sum": (use_sum, 2.0), "lookup": (use_lookup, 4.0), "named": (use_named, 3.0),
         "no call": (need_none, 2.0)}  # fmt: skip


def tool_dialogue(rng: Random, kind: str, words: list[str], held_out: bool) -> list[Message]:
    """Return a dialogue about a tool of a kind among up to two others."""
    while True:
        tool, draw = KINDS[kind][0](rng, words)
        exchange = draw()
        if (stable_hash(exchange.question) % HELD_OUT_ONE_IN == 0) == held_out:
            break
    num_others = rng.choice((0, 0, 0, 1, 1, 2))
    others = [rng.choice((use_lookup, use_named))(rng, words)[0] for _ in range(num_others)]
    tools = list({each.name: each for each in (*others, tool)}.values())
    rng.shuffle(tools)
    messages = [tools_message(rng, tools), *exchange_messages(exchange)]
    return messages + (exchange_messages(draw()) if rng.random() < 0.2 else [])
