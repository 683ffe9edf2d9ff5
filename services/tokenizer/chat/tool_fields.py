"""The tools of a request as chat templates read them. Pure."""

from collections.abc import Container
from typing import Any

# A null in place of one of these says no more than its absence.
_NULLABLE = {
    "additionalProperties",
    "allOf",
    "anyOf",
    "description",
    "enum",
    "format",
    "items",
    "oneOf",
    "parameters",
    "pattern",
    "properties",
    "required",
    "strict",
    "title",
    "type",
}
_SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions"}
_DATA = {"const", "default", "enum", "examples", "required"}

Tool = dict[str, Any]


def readable_tools(tools: list[Tool], taken_for_granted: Container[str]) -> list[Tool]:
    """``tools`` without nulls that say nothing; a field that is ``taken_for_granted`` and not there
    is empty."""
    return [_readable(_without_nulls(tool), taken_for_granted) for tool in tools]


def _readable(tool: Tool, taken_for_granted: Container[str]) -> Tool:
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    empty: Tool = {"description": "", "parameters": {"type": "object", "properties": {}}}
    filled = _filled(function, empty, taken_for_granted)
    if isinstance(parameters := filled.get("parameters"), dict):
        filled["parameters"] = _filled(parameters, {"properties": {}}, taken_for_granted)
    return tool | {"function": filled}


def _filled(fields: Tool, empty: Tool, taken_for_granted: Container[str]) -> Tool:
    missing = {
        name: value
        for name, value in empty.items()
        if name not in fields and name in taken_for_granted
    }
    return fields | missing


def _without_nulls(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_nulls(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _without_nulls_in(name, value)
        for name, value in schema.items()
        if value is not None or name not in _NULLABLE
    }


def _without_nulls_in(name: str, value: Any) -> Any:
    """``value`` is the field ``name`` of a schema."""
    if name in _DATA:
        return value
    if name in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {each: _without_nulls(schema) for each, schema in value.items()}
    return _without_nulls(value)
