"""Integers beyond 2^53 in schemas are held exactly, or refused."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.guides.compose import Wanted, compose
from services.tokenizer.guides.json_rule import integers
from shared.errors import InvalidRequest
from shared.wire.messages import OutputFormat, OutputStart
from tests.services.tokenizer.guides.conftest import Vocabulary

LARGE = (1 << 53) + 1
HUGE = 10**30 + 7
INT64 = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}
NODE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "id": {"const": LARGE},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["id"],
        }
    },
}

# a schema, accepted texts, refused texts
CASES: list[tuple[Any, list[str], list[str]]] = [
    ({"const": LARGE}, [f"{LARGE}"], [f"{LARGE - 1}", f"{LARGE}0", "1"]),
    ({"const": -(1 << 63)}, [f"{-(1 << 63)}"], [f"{-(1 << 63) + 1}"]),
    ({"const": HUGE}, [f"{HUGE}"], [f"{HUGE - 7}"]),
    ({"enum": [LARGE, "a", 7]}, [f"{LARGE}", '"a"', "7"], [f"{LARGE - 1}", "8"]),
    (
        {"type": "integer", "enum": [LARGE, LARGE + 2]},
        [f"{LARGE}", f"{LARGE + 2}"],
        [f"{LARGE + 1}", "0"],
    ),
    (
        {"const": {"a": [LARGE, {"b": None}]}},
        [f'{{"a": [{LARGE}, {{"b": null}}]}}', f'{{"a":[{LARGE},{{"b":null}}]}}'],
        [f'{{"a": [{LARGE - 1}, {{"b": null}}]}}'],
    ),
    (
        INT64,
        ["0", f"{-(1 << 63)}", f"{(1 << 63) - 1}"],
        [f"{-(1 << 63) - 1}", f"{1 << 63}", "1.5", "01"],
    ),
    (
        {"type": "integer", "exclusiveMinimum": LARGE},
        [f"{LARGE + 1}", f"{HUGE}"],
        [f"{LARGE}", "0", "-1"],
    ),
    (
        {"type": "integer", "minimum": HUGE, "maximum": HUGE + 3},
        [f"{HUGE}", f"{HUGE + 3}"],
        [f"{HUGE - 1}", f"{HUGE + 4}"],
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": INT64, "c": {"type": "boolean"}},
            "required": ["b"],
        },
        [
            '{"b": 1}',
            '{"a": "x", "b": -9223372036854775808, "c": true}',
            '{"b":1,"c":false}',
            '{\n  "a": "x",\n  "b": 1\n}',
        ],
        ['{"a": "x"}', '{"b": 9223372036854775808}', '{"c": true, "b": 1}', '{"b": 1,}', "{}"],
    ),
    (
        {"type": "object", "properties": {"a": INT64, "b": INT64}},
        ["{}", '{"a": 1}', '{"b": 2}', '{"a": 1, "b": 2}'],
        ['{"b": 1, "a": 2}', '{, "b": 1}', '{"c": 1}'],
    ),
    (
        {"type": "array", "items": {"const": LARGE}, "minItems": 1, "maxItems": 2},
        [f"[{LARGE}]", f"[{LARGE}, {LARGE}]"],
        ["[]", f"[{LARGE}, {LARGE}, {LARGE}]", f"[{LARGE},]"],
    ),
    ({"type": "array", "items": INT64}, ["[]", "[1]", "[1, -2, 3]"], ["[1.5]", "[1 2]"]),
    ({"type": ["integer", "null"], "maximum": LARGE}, [f"{LARGE}", "null"], [f"{LARGE + 1}"]),
    (
        NODE,
        [f'{{"id": {LARGE}}}', f'{{"id": {LARGE}, "next": {{"id": {LARGE}, "next": null}}}}'],
        [f'{{"id": {LARGE - 1}}}', f'{{"id": {LARGE}, "next": 1}}'],
    ),
]


def grammar_of(vocabulary: Vocabulary, schema: Any, is_strict: bool) -> str:
    format = OutputFormat("json_schema", "response_format", json.dumps(schema), is_strict)
    guide = compose(vocabulary.dialect(), Wanted(format), OutputStart.ANSWER)
    assert guide is not None
    return guide.grammar


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize(
    ("schema", "taken", "refused"), CASES, ids=lambda value: json.dumps(value)[:50]
)
def test_large_integers_are_exact(
    vocabulary: Vocabulary, schema: Any, taken: list[str], refused: list[str], is_strict: bool
) -> None:
    grammar = grammar_of(vocabulary, schema, is_strict)
    for text in taken:
        assert vocabulary.refusal(grammar, text) is None, text
    for text in refused:
        assert vocabulary.refusal(grammar, text) is not None, text


def test_strict_schemas_with_unwritten_bounds_are_refused(vocabulary: Vocabulary) -> None:
    schema = {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1, "multipleOf": 5}
    with pytest.raises(InvalidRequest, match="beside maximum, minimum, multipleOf, type") as error:
        grammar_of(vocabulary, schema, is_strict=True)
    assert error.value.param == "response_format"
    loose = grammar_of(vocabulary, schema, is_strict=False)
    assert vocabulary.refusal(loose, "15") is None
    assert vocabulary.refusal(loose, "16") is not None
    with pytest.raises(InvalidRequest, match="beside allOf"):
        grammar_of(vocabulary, {"allOf": [{"const": LARGE}, {"type": "integer"}]}, is_strict=False)


def test_schemas_without_large_integers_are_the_librarys(vocabulary: Vocabulary) -> None:
    schema = {"type": "integer", "minimum": -(1 << 53), "maximum": 1 << 53}
    assert '"minimum\\":-9007199254740992' in grammar_of(vocabulary, schema, is_strict=True)


BOUNDS = st.none() | st.integers(-3000, 3000) | st.integers(-(10**25), 10**25)


@given(BOUNDS, BOUNDS, st.lists(st.integers(-4000, 4000) | st.integers(-(10**26), 10**26)))
def test_expressions_match_the_integers_between_their_bounds(
    one: int | None, other: int | None, values: list[int]
) -> None:
    low, high = (one, other) if one is None or other is None else sorted((one, other))
    expression = re.compile(integers(low, high))
    edges = [bound + step for bound in (low, high) if bound is not None for step in (-1, 0, 1)]
    for value in (*values, *edges, 0):
        is_between = (low is None or value >= low) and (high is None or value <= high)
        assert bool(expression.fullmatch(str(value))) == is_between
    assert not any(map(expression.fullmatch, ("", "-0", "-", "007")))
