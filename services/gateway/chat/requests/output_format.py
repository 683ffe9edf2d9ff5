"""The many ways to constrain a text, as one OutputFormat."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

from services.gateway.chat.requests.format_schema import (
    FormatFields,
    JsonObject,
    JsonSchema,
    NamedSchema,
    StructuralTag,
    StructuredOutputs,
)
from services.gateway.chat.requests.json_body import json_errors
from services.gateway.chat.requests.raw_json import NULL, check_chars, json_text
from services.gateway.http.violations import show
from shared.errors import InvalidRequest
from shared.wire.messages import FormatKind, OutputFormat

NO_WHITESPACE = "()"  # matches nothing but the empty text
OBJECT_KEYS = {"properties", "patternProperties"}


def output_format(request: FormatFields) -> OutputFormat | None:
    """Raises InvalidRequest for more than one, naming two of them."""
    formats = list(_formats(request))
    _refuse_second([format.param for format in formats], "say what the text must be")
    format = formats[0] if formats else None
    whitespaces = dict(_whitespaces(request))
    _refuse_second(list(whitespaces), "say where blanks may be")
    for param, pattern in whitespaces.items():
        if format is None or not format.kind.startswith("json"):
            raise InvalidRequest(f"{param} is allowed beside a form of JSON only", param=param)
        format = msgspec.structs.replace(format, whitespace=pattern)
    if format is not None:
        check_chars(format.value, format.param)
    return format


def _refuse_second(params: list[str], both: str) -> None:
    if len(params) > 1:
        raise InvalidRequest(
            f"{params[0]} and {params[1]} both {both}; only one of them may", param=params[1]
        )


def _whitespaces(request: FormatFields) -> Iterator[tuple[str, str]]:
    """The given expressions for blanks, and their fields."""
    if request.guided_whitespace_pattern is not None:
        yield "guided_whitespace_pattern", request.guided_whitespace_pattern
    if (outputs := request.structured_outputs) is not None:
        if outputs.whitespace_pattern is not None:
            yield "structured_outputs.whitespace_pattern", outputs.whitespace_pattern
        if outputs.disable_any_whitespace:
            yield "structured_outputs.disable_any_whitespace", NO_WHITESPACE


def _formats(request: FormatFields) -> Iterator[OutputFormat]:
    if request.response_format is not None:
        yield from _of_response_format(request.response_format)
    if request.structured_outputs is not None:
        yield from _of_structured_outputs(request.structured_outputs)
    yield from _schema(request.guided_json, "guided_json")
    yield from _text("regex", request.guided_regex, "guided_regex")
    yield from _choices(request.guided_choice, "guided_choice")
    yield from _text("grammar", request.guided_grammar, "guided_grammar")
    yield from _text("regex", request.regex, "regex")
    yield from _text("grammar", request.ebnf, "ebnf")
    yield from _schema(request.json_schema, "json_schema")
    yield from _tag(request.structural_tag, "structural_tag")


def _of_response_format(format: object) -> Iterator[OutputFormat]:
    match format:
        case JsonObject(schema=schema) if schema != NULL:
            param = "response_format.schema"
            yield OutputFormat("json_schema", param, _json_object(schema, param), is_strict=False)
        case JsonObject():
            yield OutputFormat("json_object", "response_format")
        case JsonSchema(NamedSchema(schema=schema, strict=strict)):
            param = "response_format.json_schema.schema"
            yield OutputFormat("json_schema", param, _json_object(schema, param), bool(strict))
        case StructuralTag():
            yield OutputFormat(
                "structural_tag", "response_format", msgspec.json.encode(format).decode()
            )


def _of_structured_outputs(outputs: StructuredOutputs) -> Iterator[OutputFormat]:
    name = "structured_outputs"
    is_closed = bool(outputs.disable_additional_properties)
    if is_closed and outputs.json == NULL:
        param = f"{name}.disable_additional_properties"
        raise InvalidRequest(f"{param} is allowed beside {name}.json only", param=param)
    for format in _schema(outputs.json, f"{name}.json"):
        value = _without_additional(format.value) if is_closed else format.value
        yield msgspec.structs.replace(format, value=value)
    yield from _text("regex", outputs.regex, f"{name}.regex")
    yield from _choices(outputs.choice, f"{name}.choice")
    yield from _text("grammar", outputs.grammar, f"{name}.grammar")
    if outputs.json_object:
        yield OutputFormat("json_object", f"{name}.json_object")
    yield from _tag(outputs.structural_tag, f"{name}.structural_tag")


def _schema(raw: Raw, param: str) -> Iterator[OutputFormat]:
    if raw != NULL:
        yield OutputFormat("json_schema", param, _json_object(raw, param), is_strict=False)


def _tag(raw: Raw, param: str) -> Iterator[OutputFormat]:
    if raw != NULL:
        yield OutputFormat("structural_tag", param, _json_object(raw, param))


def _text(kind: FormatKind, value: str | None, param: str) -> Iterator[OutputFormat]:
    if value is not None:
        yield OutputFormat(kind, param, value)


def _choices(choices: list[str] | None, param: str) -> Iterator[OutputFormat]:
    if choices is not None:
        yield OutputFormat("choice", param, msgspec.json.encode(choices).decode())


@json_errors()
def _json_object(raw: Raw, param: str) -> str:
    """The object as it came, or as it came in a string."""
    text = json_text(raw, param)
    value = msgspec.json.decode(text)
    if isinstance(value, str):
        text = value
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"{param} is no JSON: {error}", param=param) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} is {show(value)}; expected an object", param=param)
    return text


@json_errors()
def _without_additional(schema: str) -> str:
    """The schema with every object closed, unless the object states ``additionalProperties``
    itself."""
    root = msgspec.json.decode(schema)
    unseen: list[Any] = [root]
    while unseen:
        value = unseen.pop()
        if isinstance(value, dict):
            unseen += value.values()
            if value.keys() & OBJECT_KEYS:
                value.setdefault("additionalProperties", False)
        elif isinstance(value, list):
            unseen += value
    return msgspec.json.encode(root).decode()
