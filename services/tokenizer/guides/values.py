"""Values that a schema allows, as far as formats other than JSON need them."""

from dataclasses import dataclass
from typing import Any

import msgspec

from services.tokenizer.guides.limits import MAX_CHAIN
from services.tokenizer.guides.schema import Schema, find, guided
from services.tokenizer.guides.tools import Tool

ANY: Schema = {}  # one object, for rules are found by the identity of a schema
KINDS = ("string", "number", "integer", "boolean", "null", "array", "object")


@dataclass(frozen=True, slots=True)
class Values:
    """A value matches one of ``schemas``; ``root`` is the document of their references. They are
    read loosely unless ``is_strict``."""

    schemas: list[Schema]
    root: Schema
    is_strict: bool

    @property
    def json(self) -> Schema:
        """The schema of a JSON value, with llguidance's options."""
        return self.json_of(self.types)

    def json_of(self, kinds: set[str]) -> Schema:
        """The schema of a JSON value of one of these types; empty: any."""
        kept: Schema = {
            name: self.root[name] for name in ("$defs", "definitions") if name in self.root
        }
        if kinds != self.types:
            kept["type"] = sorted(kinds)
        return guided(kept | {"anyOf": self.schemas}, self.is_strict)

    @property
    def types(self) -> set[str]:
        """The types of JSON that it may have; empty: any."""
        found: set[str] = set()
        for schema in self.schemas:
            kinds = kinds_of(schema)
            if not kinds:
                return set()
            found |= kinds
        return found

    @property
    def listed(self) -> list[Any] | None:
        """All possible values, if the schema lists them."""
        listed: list[Any] = []
        for schema in self.schemas:
            if "const" in schema:
                listed.append(schema["const"])
            elif isinstance(enum := schema.get("enum"), list):
                listed += enum
            else:
                return None
        return listed

    def of(self, schema: Any) -> "Values":
        """The values of a schema of the same document."""
        return values_of(schema, self.root, self.is_strict)


@dataclass(frozen=True, slots=True)
class Property:
    name: str
    is_required: bool
    values: Values


def kinds_of(schema: Schema) -> set[str]:
    """The types that a schema itself names."""
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return {str(kind) for kind in kinds} if isinstance(kinds, list) else set()


def values_of(schema: Any, root: Schema, is_strict: bool) -> Values:
    alternatives = _alternatives(root, schema) if isinstance(schema, dict) else [ANY]
    return Values(alternatives, root, is_strict)


def parameters(tool: Tool) -> list[Property] | None:
    """None if any parameters are allowed."""
    values = values_of(tool.parameters, tool.parameters, tool.is_strict)
    return properties(values, values.schemas[0]) if len(values.schemas) == 1 else None


def properties(values: Values, schema: Schema) -> list[Property] | None:
    """The properties of an object, one of ``values``; None if any are allowed."""
    named, required = schema.get("properties"), schema.get("required")
    if not isinstance(named, dict):
        return None
    listed = required if isinstance(required, list) else []
    names = {each for each in listed if isinstance(each, str)}
    return [Property(name, name in names, values.of(each)) for name, each in named.items()]


def as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _alternatives(root: Schema, schema: Schema) -> list[Schema]:
    """The alternative schemas of a value, with references and anyOf followed; if too many, the
    schema of any value."""
    found: list[Schema] = []
    unseen = [schema]
    for each in unseen:  # grows as it goes
        target = find(root, each["$ref"]) if isinstance(each.get("$ref"), str) else None
        members = each.get("anyOf")
        if isinstance(target, dict):
            unseen.append(target)
        elif isinstance(members, list) and members and len(members) <= MAX_CHAIN:
            unseen += [member if isinstance(member, dict) else ANY for member in members]
        else:
            found.append(each)
        if len(unseen) > MAX_CHAIN:
            return [ANY]
    return found
