"""Keywords beyond grammars: dropped and named without ``strict``, refused with it."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from services.tokenizer.guides.guides import Guides
from services.tokenizer.guides.limits import Totals
from services.tokenizer.guides.looser import FORMATS, IGNORED
from services.tokenizer.guides.schema import checked, guided
from shared.errors import InvalidRequest
from shared.wire.messages import ChatOptions, OutputFormat, OutputStart, ToolChoice
from tests.services.tokenizer.guides.conftest import vocabulary_with
from tests.services.tokenizer.guides.test_guides import guides, submitted

__all__ = ["guides"]  # a fixture

LOOKAHEAD = r"^(?!\.)[a-z.]+@x$"


def one(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": keywords}, "required": ["a"]}


UNHELD: dict[str, dict[str, Any]] = {
    "properties.a.pattern": one(type="string", pattern=LOOKAHEAD),
    "properties.a.items.pattern": one(type="array", items={"pattern": r"(?<=a)b"}),
    "$defs.x.pattern": {"$ref": "#/$defs/x", "$defs": {"x": {"pattern": r"(a)\1"}}},
    "anyOf[1].pattern": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"\bx"}]},
    "properties.a.patternProperties": one(
        patternProperties={LOOKAHEAD: {}}, additionalProperties=False
    ),
    "patternProperties": {"patternProperties": {"^a": {"type": "string"}, "^ab": {}}},
    "properties.a.$ref": one(**{"$ref": "https://example.com/schema.json"}),
    "$schema": {"$schema": "https://example.com/draft", "type": "object"},
    "properties.a.type": one(type="date"),
    "properties.a.format": one(type="string", format="phone"),
    "properties.a.required": one(type="object", required=True),
    "properties.a.minLength": one(type="string", minLength="2"),
    "properties.a.maximum": one(type="integer", maximum="2"),
    "properties.a.multipleOf": one(type="integer", multipleOf=0),
    "properties.a.not": one(**{"not": {"type": "string"}}),
}


async def left_out_of(guides: Guides, **fields: Any) -> list[str]:
    found: list[str] = []
    guide = await guides.guide_of(submitted(**fields), OutputStart.ANSWER, found.extend)
    assert guide is not None
    # The grammar still constrains something.
    assert vocabulary_with().refusal(guide.grammar, "x") is not None
    return found


async def test_a_form_is_read_loosely_and_dropped_keywords_are_named(
    guides: Guides, subtests: pytest.Subtests
):
    for place, schema in UNHELD.items():
        value = {"type": "object", "properties": {"in": schema}}
        format = OutputFormat("json_schema", "guided_json", json.dumps(schema), is_strict=False)
        if "$ref" not in schema and "$schema" not in schema:
            format = OutputFormat("json_schema", "f", json.dumps(value), is_strict=False)
            place = f"properties.in.{place}"
        with subtests.test(place):
            assert await left_out_of(guides, format=format) == [f"{format.param}.{place}"]
            strict = OutputFormat("json_schema", format.param, format.value)
            with pytest.raises(InvalidRequest) as refused:
                await left_out_of(guides, format=strict)
            assert refused.value.param == format.param


async def test_the_arguments_of_a_required_call_are_read_loosely(guides: Guides):
    def tools(is_strict: bool | None) -> ChatOptions:
        parameters = one(type="string", pattern=LOOKAHEAD)
        function = {"name": "now", "parameters": parameters, "strict": is_strict}
        return ChatOptions(tools=json.dumps([{"type": "function", "function": function}]))

    for choice in (ToolChoice("required"), ToolChoice("required", ["now"])):
        found = await left_out_of(guides, chat=tools(None), tool_choice=choice)
        assert found == ["tools[0].function.parameters.properties.a.pattern"]
        with pytest.raises(InvalidRequest, match="look-around"):
            await left_out_of(guides, chat=tools(True), tool_choice=choice)


async def test_enforceable_keywords_stay_beside_others(guides: Guides):
    schema = one(type="string", pattern=LOOKAHEAD)
    schema["properties"] |= {"b": {"type": "string", "pattern": "^[0-9]+$"}, "c": {"enum": [1]}}
    format = OutputFormat("json_schema", "f", json.dumps(schema), is_strict=False)
    guide = await guides.guide_of(submitted(format=format), OutputStart.ANSWER)
    assert guide is not None
    refusal = vocabulary_with().refusal
    assert refusal(guide.grammar, '{"a": ".anything", "b": "12", "c": 1}') is None
    assert refusal(guide.grammar, '{"a": ".anything", "b": "x"}') is not None
    assert refusal(guide.grammar, '{"a": 1}') is not None


async def test_an_unsatisfiable_form_is_refused(guides: Guides):
    schema = json.dumps(one(type="integer", minimum=5, maximum=1))
    format = OutputFormat("json_schema", "f", schema, is_strict=False)
    with pytest.raises(InvalidRequest, match="Unsatisfiable"):
        await left_out_of(guides, format=format)


def error_of(schema: dict[str, Any]) -> str:
    """llguidance's error in strict mode."""
    written = guided(checked(schema, "f", Totals()), is_strict=True)
    grammar = json.dumps({"grammars": [{"json_schema": written}]})
    return str(LLMatcher(vocabulary_with().matching, grammar, log_level=0).get_error())


def test_llguidance_knows_the_formats_and_ignores_the_keywords(subtests: pytest.Subtests):
    for format in sorted(FORMATS):
        with subtests.test(format):
            assert error_of({"type": "string", "format": format}) == ""
    for name in sorted(IGNORED):
        with subtests.test(name):
            assert "Unimplemented keys" in error_of({name: {}})
