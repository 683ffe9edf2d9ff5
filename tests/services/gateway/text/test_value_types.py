"""Values written as text become JSON of the schema's types."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.value_types import ANY, Types, json_of, types_of_parameters

ROOT: dict[str, Any] = {
    "properties": {"loop": {"$ref": "#/properties/loop"}, "a/b": {"type": "number"}},
    "$defs": {
        "id": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/name"}]},
        "name": {"const": "x"},
    },
}
TYPES: list[tuple[Any, set[str]]] = [
    ({"type": "string"}, {"string"}),
    ({"type": ["integer", "null"]}, {"integer", "null"}),
    ({"$ref": "#/$defs/id"}, {"integer", "string"}),
    ({"$ref": "#/properties/a~1b"}, {"number"}),
    ({"$ref": "#/properties/loop"}, set()),
    ({"$ref": "#/nowhere"}, set()),
    ({"oneOf": [{"type": "string"}, {}]}, set()),
    ({"allOf": [{}, {"type": "array"}]}, {"array"}),
    (
        {"enum": ["a", 1, None, True, 1.5, [], {}]},
        {*["string", "integer", "null", "boolean", "number"], "array", "object"},
    ),
    ({}, set()),
    (True, set()),
    ({"type": 7}, set()),
    ({"anyOf": "x"}, set()),
]
VALUES = [
    # text, types, JSON
    ("12", {"integer"}, "12"),
    (" 12\n", {"integer"}, "12"),
    ("12", {"number"}, "12"),
    ("12", {"string", "number"}, "12"),
    ("12", {"string"}, '"12"'),
    ("12", ANY, "12"),
    ("twelve", {"integer"}, '"twelve"'),
    ('"12"', {"integer"}, '"12"'),
    ('"12"', ANY, r'"\"12\""'),
    ("True", {"boolean"}, "true"),
    ("None", {"string", "null"}, "null"),
    ("NaN", {"number"}, '"NaN"'),
    ("[1, {}]", {"array"}, "[1, {}]"),
    ("[1, {]", {"array"}, '"[1, {]"'),
    ("", {"object"}, '""'),
    ("[" * 100_000, {"array"}, json.dumps("[" * 100_000)),
    ("9" * 5000, {"integer"}, json.dumps("9" * 5000)),
]


def test_types_are_read_from_the_schema(subtests: pytest.Subtests):
    for schema, types in TYPES:
        with subtests.test(schema=schema):
            assert Types(ROOT).of(schema) == types


class CountedReads(dict[str, Any]):
    num_reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.num_reads += 1
        return super().get(key, default)


def test_a_schema_to_which_many_paths_lead_is_read_once():
    leaf = CountedReads(type="string")
    schema: dict[str, Any] = {"properties": {"value": {"$ref": "#/$defs/0"}}, "$defs": {"5": leaf}}
    for level in range(5):
        schema["$defs"][str(level)] = {"anyOf": [{"$ref": f"#/$defs/{level + 1}"}] * 4}
    assert types_of_parameters(schema) == {"value": {"string"}}
    assert leaf.num_reads == 2, "$ref and type"


def test_a_schema_without_properties_has_no_types():
    schema: Any
    for schema in (None, {}, {"properties": []}, True):
        assert types_of_parameters(schema) == {}


def test_values_are_of_the_types_that_are_allowed(subtests: pytest.Subtests):
    for text, types, expected in VALUES:
        with subtests.test(text=text[:20], types=types):
            assert json_of(text, frozenset(types)) == expected


@given(st.text(), st.sampled_from([ANY, frozenset({"integer"}), frozenset({"string", "null"})]))
def test_every_text_becomes_json(text: str, types: frozenset[str]):
    json.loads(json_of(text, types))
