"""Oversized schemas are refused with place and limit, before compiling."""

import json
from typing import Any

import pytest

from services.tokenizer.guides import limits
from services.tokenizer.guides.compose import Wanted, compose
from shared.errors import InvalidRequest
from shared.wire.messages import FormatKind, OutputFormat, OutputStart
from tests.services.tokenizer.guides.conftest import Vocabulary

PARAM = "response_format.json_schema.schema"


def nested(depth: int) -> str:
    """An object of this depth."""
    return '{"items": ' * (depth - 1) + "{}" + "}" * (depth - 1)


def properties(num: int, **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {} for index in range(num)}, **others}


def required(num: int) -> dict[str, Any]:
    return properties(num, required=[f"p{index}" for index in range(num)])


def chain(length: int) -> dict[str, Any]:
    """``length`` schemas in total that refer to one another."""
    steps = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(length - 2)}
    return {"$defs": {**steps, f"d{length - 2}": {}}, "$ref": "#/$defs/d0"}


# kind, value within its limit or None, value beyond, the place after PARAM, a number in the text
CASES: list[tuple[FormatKind, Any, Any, str, int]] = [
    ("json_schema", nested(48), nested(49), ".items" * 48, 48),
    ("json_schema", None, nested(100_000), "", 48),
    ("json_schema", properties(400), properties(401), "", 401),
    (
        "json_schema",
        {"properties": {"x": properties(400)}},
        {"properties": {"x": properties(401)}},
        ".properties.x",
        400,
    ),
    ("json_schema", required(5000), required(5001), "", 5000),
    ("json_schema", {"enum": [*range(5000)]}, {"enum": [*range(5001)]}, "", 5000),
    ("json_schema", None, {"items": {"enum": ["x" * 120_000]}}, ".items", 120_000),
    ("json_schema", None, {"const": "x" * (256 << 10)}, "", 256 << 10),
    ("json_schema", chain(128), chain(129), "", 128),
    ("json_schema", None, chain(5000), "", 128),
    ("json_schema", None, {"pattern": "a" * 16385}, ".pattern", 16384),
    ("json_schema", None, {"patternProperties": {"a\0": {}}}, ".patternProperties", 0),
    ("regex", "a" * 16384, "a" * 16385, "", 16384),
    ("regex", None, "a\0", "", 0),
    ("choice", ["a"] * 10_000, ["a"] * 10_001, "", 10_000),
    ("choice", None, ["a" * (256 << 10)], "", 256 << 10),
    ("grammar", 'start: "a"\n' + "\n" * 30_000, 'start: "a"\n' + "\n" * 33_000, "", 32768),
    (
        "grammar",
        "start: r1\n" + "".join(f"r{index}: r1\n" for index in range(999)),
        "start: r1\n" + "".join(f"r{index}: r1\n" for index in range(1000)),
        "",
        1000,
    ),
    ("grammar", None, "".join(f'root{index} ::= "a"\n' for index in range(1001)), "", 1000),
    (
        "structural_tag",
        None,
        {"format": {"type": "sequence", "elements": [{"type": "any_text"}] * 1001}},
        ".format.elements[999]",
        1000,
    ),
]


def composed(vocabulary: Vocabulary, kind: FormatKind, value: Any) -> None:
    text = value if isinstance(value, str) else json.dumps(value)
    wanted = Wanted(OutputFormat(kind, PARAM, text[: 256 << 10] if value is None else text))
    compose(vocabulary.dialect(), wanted, OutputStart.ANSWER)


def test_values_beyond_a_limit_are_refused_by_place_and_number(
    vocabulary: Vocabulary, subtests: pytest.Subtests
):
    for index, (kind, within, beyond, place, number) in enumerate(CASES):
        with subtests.test(index=index, kind=kind, number=number):
            if within is not None:
                composed(vocabulary, kind, within)
            with pytest.raises(InvalidRequest) as refused:
                composed(vocabulary, kind, beyond)
            error = refused.value
            assert error.code == "invalid_grammar"
            assert error.param is not None
            assert error.message.startswith(error.param)
            assert str(number or "NUL") in error.message
            assert error.param == f"{PARAM}{place}"[:256]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"type": "string"}, {"$ref": "#"}]},
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    ],
)
def test_a_schema_that_is_itself_is_refused(vocabulary: Vocabulary, schema: dict[str, Any]):
    with pytest.raises(InvalidRequest, match="refers to itself"):
        composed(vocabulary, "json_schema", schema)


def test_a_schema_that_contains_itself_is_taken(vocabulary: Vocabulary):
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}, "required": ["child"]}
    composed(vocabulary, "json_schema", tree)


def test_annotations_do_not_count_but_properties_with_their_names_do(vocabulary: Vocabulary):
    annotated = {
        "description": "x" * (300 << 10),
        "properties": {"description": {"type": "string", "title": "y" * (10 << 10)}},
    }
    format = OutputFormat("json_schema", PARAM, json.dumps(annotated))
    guide = compose(vocabulary.dialect(), Wanted(format), OutputStart.ANSWER)
    assert guide is not None
    assert len(guide.grammar) < 1000
    assert vocabulary.refusal(guide.grammar, '{"description": "a"}') is None
    assert vocabulary.refusal(guide.grammar, '{"description": 1}') is not None


def test_all_tools_of_a_request_count_together(vocabulary: Vocabulary):
    tools = [
        {"function": {"name": f"f{index}", "strict": True, "parameters": required(999)}}
        for index in range(6)
    ]
    with pytest.raises(InvalidRequest) as refused:
        compose(vocabulary.dialect("hermes"), Wanted(tools=json.dumps(tools)), OutputStart.ANSWER)
    assert refused.value.param == "tools[5].function.parameters"
    assert str(limits.MAX_PROPERTIES) in refused.value.message


def test_long_names_cost_no_more_than_their_length(vocabulary: Vocabulary):
    """Neither in the paths of errors nor in definitions shared by many parameters."""
    name = "x" * 100_000
    parameters = {
        "$defs": {"all": {"anyOf": [{"const": each} for each in range(5000)]}, name: {}},
        "properties": {f"p{each}": {"$ref": "#/$defs/all"} for each in range(400)},
        "required": ["p0"],
    }
    composed(vocabulary, "json_schema", {"properties": {name: properties(400)}})
    tools = json.dumps([{"function": {"name": "f", "strict": True, "parameters": parameters}}])
    for parser in ("qwen3_coder", "glm45", "pythonic"):
        compose(vocabulary.dialect(parser), Wanted(tools=tools), OutputStart.ANSWER)
    with pytest.raises(InvalidRequest) as refused:
        composed(vocabulary, "json_schema", {"properties": {name: properties(401)}})
    assert refused.value.param == f"{PARAM}.properties.{name}"[:256]


def test_a_grammar_that_is_too_long_for_a_message_is_refused(vocabulary: Vocabulary):
    """Here each parameter includes all definitions."""
    parameters = {
        "$defs": {"number": {"type": "integer", "enum": [*range(4000)]}},
        "properties": {
            f"p{each}": {"type": "array", "items": {"$ref": "#/$defs/number"}, "maxItems": each}
            for each in range(400)
        },
    }
    tools = json.dumps([{"function": {"name": "f", "strict": True, "parameters": parameters}}])
    with pytest.raises(InvalidRequest, match="characters of the grammar; the limit is") as refused:
        compose(vocabulary.dialect("qwen3_coder"), Wanted(tools=tools), OutputStart.ANSWER)
    assert refused.value.param == "tools"


def test_malformed_json_is_refused(vocabulary: Vocabulary, subtests: pytest.Subtests):
    kind: Any
    for kind, value in (
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("choice", '["a", 1]'),
        ("choice", "[]"),
        ("structural_tag", "1"),
        ("grammar", "root ::= %"),
        ("grammar", 'other ::= "a"'),
        ("grammar", "root ::= other"),
    ):
        with subtests.test(value), pytest.raises(InvalidRequest) as refused:
            composed(vocabulary, kind, value)
        assert refused.value.param == PARAM
