"""The parser of every format reads each text that the grammar of its calls admits, in any pieces,
and changes no value in it."""

import ast
import json
import random
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import jsonschema
import pytest

from services.tokenizer.guides.compose import Wanted, compose
from shared.dialects.formats import (
    BareLayout,
    PairsLayout,
    PythonicLayout,
    TaggedLayout,
    ToolFormat,
)
from shared.dialects.tools import TOOL_FORMATS
from shared.wire.messages import OutputStart, ToolChoice
from tests.services.gateway.text.replies import Told, all_cuts, cut, markers_of, rules, run, told
from tests.services.tokenizer.guides.conftest import Vocabulary, vocabulary_with
from tests.shared.dialects.admitted import admitted

NUM_TEXTS = 12  # of each format, with markers as tokens, and again as text
NUM_CUTS = 6
PYTHON_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "is_new": {"type": "boolean"},
        "unit": {"enum": ["Celsius", "3", 3, None]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "name": {"type": "string"}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "any": {},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
FUNCTIONS: dict[str, Any] = {
    "weather": SCHEMA,
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "note": {"type": "object"},
}
TOOLS = json.dumps(
    [{"function": {"name": name, "parameters": each}} for name, each in FUNCTIONS.items()]
)
REQUIRED = ToolChoice("required")
NAMES = sorted({each.name for each in TOOL_FORMATS.values()} - {"openai"})


def vocabulary_of(format: ToolFormat, has_tokens: bool) -> Vocabulary:
    return vocabulary_with(*sorted(markers_of(rules(format.name))) if has_tokens else ())


def texts_of(format: ToolFormat) -> list[str]:
    """All texts of the description, alone and as the ends of values and names."""
    layout = format.layout
    texts = [str(getattr(layout, each.name)) for each in fields(layout)]
    return [text for text in (*sorted(format.markers), *texts, *ends_of(format)) if text]


def ends_of(format: ToolFormat) -> list[str]:
    match format.layout:
        case TaggedLayout() as layout:
            end = layout.value_padding + layout.parameter_close + layout.line_end
            return [end, *(end + layout.function_close for _ in range(3))]
        case PairsLayout() as layout:
            end = layout.value_close + layout.line_end
            return [end, end + format.call_close]
    return []


def written(format: ToolFormat, value: str) -> list[str]:
    """The forms in which a string of the arguments may stand in a text."""
    match format.layout:
        case TaggedLayout() as layout:
            begun = layout.name_close + layout.value_padding + value
            return [
                f"{begun}{padding}{layout.parameter_close}"
                for padding in ("", layout.value_padding)
            ]
        case PairsLayout() as layout:
            return [layout.value_open + value + layout.value_close]
        case BareLayout(quote=quote):
            return [quote + value + quote]
    return []


def strings_in(value: Any) -> Iterator[str]:
    """The strings of a value, without keys."""
    match value:
        case str():
            yield value
        case dict() | list():
            for each in value.values() if isinstance(value, dict) else value:
                yield from strings_in(each)


def check(format: ToolFormat, text: str, calls: list[Told]) -> None:
    assert calls
    assert all(kind == "call" for kind, *_ in calls), calls
    for _, name, arguments in calls:
        values = json.loads(arguments)
        jsonschema.validate(values, FUNCTIONS[name])
        match format.layout:
            case BareLayout():
                for each in strings_in(values):
                    assert written(format, each)[0] in text
            case TaggedLayout() | PairsLayout():
                for each in values.values():
                    leaf = each if isinstance(each, str) else json.dumps(each)
                    assert isinstance(each, dict | list | int | float | None) or any(
                        form in text for form in written(format, leaf)
                    ), (leaf, text)
            case PythonicLayout():
                assert set(strings_in(values)) <= set(literals(text)), text
            case _:
                assert arguments in text


def literals(text: str) -> list[str]:
    """The strings of Python in ``text``."""
    return [ast.literal_eval(each) for each in PYTHON_STRING.findall(text)]


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", NAMES)
def test_every_admitted_text_of_forced_calls_is_read_unchanged(name: str, has_tokens: bool):
    format = TOOL_FORMATS[name]
    vocabulary = vocabulary_of(format, has_tokens)
    guide = compose(
        vocabulary.dialect(name), Wanted(tools=TOOLS, choice=REQUIRED), OutputStart.ANSWER
    )
    assert guide is not None
    of = rules(name, functions=FUNCTIONS, added_tokens=vocabulary.added)
    rng = random.Random(name)
    for _ in range(NUM_TEXTS):
        text = admitted(vocabulary, guide.grammar, texts_of(format), rng)
        whole = told(run(of, cut(text.text, text.marks, []), OutputStart.ANSWER))
        check(format, text.text, whole)
        for pieces in all_cuts(text.text, text.marks, NUM_CUTS):
            assert told(run(of, pieces, OutputStart.ANSWER)) == whole, pieces
