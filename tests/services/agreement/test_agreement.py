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
    ElementsLayout,
    PairsLayout,
    PythonicLayout,
    TaggedLayout,
    ToolFormat,
)
from shared.dialects.known import KNOWN
from shared.wire.messages import OutputStart, ToolChoice
from tests.services.agreement.admitted import admitted
from tests.services.gateway.text.replies import Told, all_cuts, cut, markers_of, rules, run, told
from tests.services.tokenizer.guides.conftest import vocabulary_with

NUM_TEXTS = 1  # of each format, with markers as tokens, and again as text
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
            "properties": {
                "x": {"type": "integer"},
                "name": {"type": "string"},
                "inner": {"$ref": "#/$defs/inner"},
            },
            "required": ["x"],
            "additionalProperties": False,
        },
        "any": {},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {
        "inner": {
            "type": "object",
            "properties": {"list": {"type": "array", "items": {"$ref": "#/$defs/inner"}}},
            "additionalProperties": False,
        }
    },
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
NAMES = sorted({each.name for each in KNOWN.tools.values()})
REASONING = {"openai": "openai_gptoss"}
REASONING |= {name: name for name in ("inkling", "kimi_k3", "muse_glimmer")}


def texts_of(format: ToolFormat) -> list[str]:
    """All texts of the description, alone and as the ends of values and names."""
    layout = format.layout
    texts = [str(getattr(layout, each.name)) for each in fields(layout)]
    return [text for text in (*sorted(format.markers), *texts, *ends_of(format)) if text]


def ends_of(format: ToolFormat) -> list[str]:
    match format.layout:
        case TaggedLayout() as layout:
            end = layout.value_padding + layout.parameter_close + layout.line_end
            return [end, end + layout.function_close]
        case PairsLayout() as layout:
            end = layout.value_close + layout.line_end
            return [end, end + format.call_close]
        case ElementsLayout() as layout:
            return [f"{layout.tag_open}/{name}{layout.tag_close}" for name in SCHEMA["properties"]]
    return []


def strings_in(value: Any) -> Iterator[str]:
    """The strings of a value, without keys."""
    match value:
        case str():
            yield value
        case dict() | list():
            for each in value.values() if isinstance(value, dict) else value:
                yield from strings_in(each)


def forms_of(format: ToolFormat, value: str) -> list[str]:
    """The forms in which a string of the arguments stands in a text."""
    match format.layout:
        case TaggedLayout() as layout:
            begun = f"{layout.name_close}{layout.value_padding}{value}{layout.value_padding}"
            return [begun + layout.parameter_close]
        case PairsLayout() as layout:
            return [layout.value_open + value + layout.value_close]
        case BareLayout(quote=quote):
            return [quote + value + quote]
        case ElementsLayout() as layout:
            return [f"{layout.tag_close}{value}{layout.tag_open}/"]
    return []


def check(format: ToolFormat, text: str, parts: list[Told]) -> None:
    """Nothing but calls and reasoning; their arguments match their schemas and are the text's."""
    calls = [part for part in parts if part[0] == "call"]
    assert calls
    assert {kind for kind, *_ in parts} <= {"call", "reasoning"}, parts
    for _, name, arguments in calls:
        values = json.loads(arguments)
        jsonschema.validate(values, FUNCTIONS[name])
        check_strings(format, text, arguments, values)


def check_strings(format: ToolFormat, text: str, arguments: str, values: dict[str, Any]) -> None:
    match format.layout:
        case TaggedLayout() | PairsLayout():
            strings = [each for each in values.values() if isinstance(each, str)]
        case PythonicLayout():
            written = {ast.literal_eval(each) for each in PYTHON_STRING.findall(text)}
            assert set(strings_in(values)) <= written, text
            return
        case BareLayout() | ElementsLayout():
            strings = [*strings_in(values)]
        case _:
            assert arguments in text
            return
    for each in strings:
        assert any(form in text for form in forms_of(format, each)), (each, text)


@pytest.mark.parametrize(
    ("name", "has_tokens"),
    [
        (name, has_tokens)
        for name in NAMES
        for has_tokens in (True, False)
        if has_tokens or not KNOWN.tools[name].channels  # whose markers would be in their text
    ],
)
def test_every_admitted_text_of_forced_calls_is_read_unchanged(name: str, has_tokens: bool):
    format, reasoning = KNOWN.tools[name], REASONING.get(name, "")
    start = OutputStart.UNDECIDED if format.channels else OutputStart.ANSWER
    vocabulary = vocabulary_with(*sorted(markers_of(rules(name))) if has_tokens else ())
    dialect = vocabulary.dialect(name, reasoning)
    guide = compose(dialect, Wanted(tools=TOOLS, choice=REQUIRED), start)
    assert guide is not None
    of = rules(name, reasoning, functions=FUNCTIONS, added_tokens=vocabulary.added)
    rng = random.Random(name)
    for _ in range(NUM_TEXTS):
        text = admitted(vocabulary, guide.grammar, texts_of(format), rng)
        whole = told(run(of, cut(text.text, text.marks, []), start))
        check(format, text.text, whole)
        for pieces in all_cuts(text.text, text.marks, NUM_CUTS):
            assert told(run(of, pieces, start)) == whole, pieces
