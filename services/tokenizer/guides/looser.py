"""The keywords of a JSON schema that no grammar can express, and the rest of a schema that is read
loosely. Pure.

A probe is a small schema with one keyword of the client's; llguidance decides if a grammar can
express it.
"""

from collections.abc import Callable, Container, Iterator
from typing import Any

import msgspec

Schema = dict[str, Any]
Find = Callable[[str], Any]

TYPES = {"array", "boolean", "integer", "null", "number", "object", "string"}
FORMATS = {
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "time",
    "uri",
    "uuid",
}
IGNORED = {
    "$dynamicRef",
    "$recursiveRef",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
}
"""Keywords unknown to llguidance."""

_COUNTS = {"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"}
_NUMBERS = {"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"}


def probes_of(schema: Schema) -> Iterator[tuple[str, str]]:
    """Keywords of this schema alone, each with its probe."""
    if isinstance(pattern := schema.get("pattern"), str):
        yield "pattern", _written({"type": "string", "pattern": pattern})
    if isinstance(patterns := schema.get("patternProperties"), dict):
        probe = {"type": "object", "patternProperties": {each: {} for each in patterns}}
        yield "patternProperties", _written(probe)


def loosen(schema: Schema, find: Find, unheld: Container[str]) -> list[str]:
    """Removes keywords that no grammar can express from this schema alone, keywords of ``unheld``
    probes included; returns the keywords that are not enforced. ``find`` resolves a reference, or
    returns None.
    """
    names = [name for name, probe in probes_of(schema) if probe in unheld]
    names += [name for name in schema if not _is_held(name, schema[name], find)]
    for name in names:
        del schema[name]
    if "patternProperties" in names:  # any name is allowed now
        schema["additionalProperties"] = True
    return [*names, *(name for name in schema if name in IGNORED)]


def _is_held(name: str, value: Any, find: Find) -> bool:
    match name:
        case "type":
            types = value if isinstance(value, list) else [value]
            return all(isinstance(each, str) and each in TYPES for each in types)
        case "format":
            return isinstance(value, str) and value in FORMATS
        case "pattern":
            return isinstance(value, str)
        case "required":
            return isinstance(value, list)
        case "$ref":
            return not isinstance(value, str) or find(value) is not None
        case "$schema":
            return isinstance(value, str) and "json-schema.org/" in value
        case "multipleOf":
            return _is_number(value) and value > 0
    if name in _COUNTS:
        return _is_number(value) and isinstance(value, int) and value >= 0
    return name not in _NUMBERS or isinstance(value, int | float)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _written(probe: Schema) -> str:
    return msgspec.json.encode(probe).decode()
