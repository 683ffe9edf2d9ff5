"""Every way to request a form of output is one OutputFormat."""

import json
from typing import Any

import pytest

from services.gateway.chat.requests.raw_json import MAX_FIELD_BYTES
from shared.errors import InvalidRequest
from shared.wire.messages import OutputFormat
from tests.services.gateway.asking import chat, check_refusals, completion

SCHEMA = {"type": "object", "properties": {"ä": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)
TAG = {"format": {"type": "const_string", "value": "a"}}
OF_OPENAI = "response_format.json_schema.schema"


def named(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA} | more}


FORMS: list[tuple[dict[str, Any], OutputFormat | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None, "structured_outputs": {}}, None),
    ({"structured_outputs": {"json_object": False}}, None),
    ({"response_format": {"type": "json_object"}}, OutputFormat("json_object", "response_format")),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}},
     OutputFormat("json_schema", "response_format.schema", TEXT, False)),
    ({"response_format": named()}, OutputFormat("json_schema", OF_OPENAI, TEXT, False)),
    ({"response_format": named(strict=False)}, OutputFormat("json_schema", OF_OPENAI, TEXT, False)),
    ({"response_format": named(strict=True)}, OutputFormat("json_schema", OF_OPENAI, TEXT)),
    ({"response_format": {"type": "structural_tag"} | TAG},
     OutputFormat("structural_tag", "response_format",
     '{"type":"structural_tag","format":{"type": "const_string", "value": "a"}}')),
    ({"structured_outputs": {"json": SCHEMA}},
     OutputFormat("json_schema", "structured_outputs.json", TEXT, False)),
    ({"structured_outputs": {"json": TEXT, "whitespace_pattern": " ?"}},
     OutputFormat("json_schema", "structured_outputs.json", TEXT, False, whitespace=" ?")),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
     OutputFormat("json_object", "structured_outputs.json_object", whitespace="()")),
    ({"structured_outputs": {"regex": "a+"}},
     OutputFormat("regex", "structured_outputs.regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "ö"]}},
     OutputFormat("choice", "structured_outputs.choice", '["a","ö"]')),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}},
     OutputFormat("grammar", "structured_outputs.grammar", 'root ::= "a"')),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}},
     OutputFormat("structural_tag", "structured_outputs.structural_tag", json.dumps(TAG))),
    ({"guided_json": SCHEMA}, OutputFormat("json_schema", "guided_json", TEXT, False)),
    ({"guided_json": TEXT, "guided_whitespace_pattern": " "},
     OutputFormat("json_schema", "guided_json", TEXT, False, whitespace=" ")),
    ({"guided_regex": "a", "guided_decoding_backend": "xgrammar"},
     OutputFormat("regex", "guided_regex", "a")),
    ({"guided_choice": ["a"]}, OutputFormat("choice", "guided_choice", '["a"]')),
    ({"guided_grammar": "start: A"}, OutputFormat("grammar", "guided_grammar", "start: A")),
    ({"regex": "a"}, OutputFormat("regex", "regex", "a")),
    ({"ebnf": 'root ::= "a"'}, OutputFormat("grammar", "ebnf", 'root ::= "a"')),
    ({"json_schema": TEXT}, OutputFormat("json_schema", "json_schema", TEXT, False)),
]  # fmt: skip


def test_each_spelling_is_one_format_in_both_endpoints(subtests: pytest.Subtests) -> None:
    for fields, expected in FORMS:
        with subtests.test(fields=fields):
            assert chat(**fields).format == expected
            assert completion(**fields).format == expected


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex",
     "response_format and regex both"),
    ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "guided_regex and guided_ch"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex",
     "structured_outputs.json and"),
    ({"response_format": {"type": "xml"}}, "response_format.type", '"xml"'),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
     "response_format.json_schema.schema", "required"),
    ({"response_format": named(schema=[1])}, OF_OPENAI, "a list of 1; expected an object"),
    ({"response_format": named(schema="{")}, OF_OPENAI, "no JSON"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "not a field"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ">= 1"),
    ({"guided_choice": ["a", 1]}, "guided_choice[1]", "expected str"),
    ({"guided_json": 3}, "guided_json", "expected an object"),
    ({"guided_json": "[1]"}, "guided_json", "expected an object"),
    ({"regex": ""}, "regex", ">= 1"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "a form of JSON only"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
     "structured_outputs.disable_any_whitespace", "a form of JSON only"),
    (
        {
            "structured_outputs": {
                "json": SCHEMA,
                "whitespace_pattern": " ",
                "disable_any_whitespace": True,
            }
        },
        "structured_outputs.disable_any_whitespace",
        "both say where blanks",
    ),
    ({"structured_outputs": {"json_object": True, "disable_additional_properties": True}},
     "structured_outputs.disable_additional_properties", "structured_outputs.json only"),
    ({"json_schema": {"a": "x" * MAX_FIELD_BYTES}}, "json_schema", f"limit is {MAX_FIELD_BYTES}"),
]  # fmt: skip


def test_a_wrong_form_is_refused_and_its_field_named(subtests: pytest.Subtests) -> None:
    check_refusals(WRONG, subtests)


def test_a_format_that_grows_beyond_the_wire_limit_is_refused_here() -> None:
    many: Any = {f"p{number}": {"properties": {}} for number in range(9000)}
    outputs = {"json": {"properties": many}, "disable_additional_properties": True}
    with pytest.raises(InvalidRequest, match=r"becomes 4[0-9]{5} characters; the limit is 262144"):
        chat(structured_outputs=outputs)


def test_objects_of_a_schema_are_closed_unless_they_say_that_they_are_open() -> None:
    open_one = {"properties": {}, "additionalProperties": True}
    schema = {"properties": {"a": {"properties": {}}, "b": open_one, "c": {}}, "anyOf": [SCHEMA]}
    job = chat(structured_outputs={"json": schema, "disable_additional_properties": True})
    assert job.format is not None
    assert json.loads(job.format.value) == {
        "properties": {
            "a": {"properties": {}, "additionalProperties": False},
            "b": open_one,
            "c": {},
        },
        "anyOf": [SCHEMA | {"additionalProperties": False}],
        "additionalProperties": False,
    }


def test_a_deep_schema_is_an_error_and_no_crash() -> None:
    deep = '{"a":' * 3000 + "1" + "}" * 3000
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        chat(guided_json=deep)
