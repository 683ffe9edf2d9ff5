"""The JSON types allowed by a schema, and text as values of these types."""

import json
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from shared.text.json_types import type_of

ANY: frozenset[str] = frozenset()
_MAX_DEPTH = 16
_MAX_ALTERNATIVES = 128
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def types_of_parameters(schema: Any) -> dict[str, frozenset[str]]:
    """The types of each property of an object; see ``Types``."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    types = Types(schema)
    return {name: types.of(each) for name, each in properties.items()}


class Types:
    """``of`` a schema in ``root``, where ``$ref`` is looked up: ``ANY`` without a type. Each schema
    is read once, even if many others refer to it."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, frozenset[str]] = {}

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return ANY
        if id(schema) not in self._known:
            self._known[id(schema)] = ANY  # to a schema in it that leads back here
            self._known[id(schema)] = self._read(schema, depth + 1)
        return self._known[id(schema)]

    def child(self, schema: Any, name: str | None) -> Any:
        """The schema of a member of an object, without ``name`` of an item of an array."""
        for each in self._alternatives(schema):
            named, others = each.get("properties"), each.get("additionalProperties")
            if name is None and "items" in each:
                return each["items"]
            if name is not None and isinstance(named, Mapping) and name in named:
                return named[name]
            if name is not None and isinstance(others, Mapping):
                return others
        return {}

    def _alternatives(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """The schema, and those that it refers to or that it consists of."""
        unseen = deque([schema])
        for _ in range(_MAX_ALTERNATIVES):
            each = unseen.popleft() if unseen else None
            if not isinstance(each, Mapping):
                continue
            yield each
            if isinstance(ref := each.get("$ref"), str):
                unseen.append(_resolve(ref, self._root))
            for key in ("anyOf", "oneOf", "allOf"):
                unseen += each[key] if isinstance(each.get(key), list) else ()

    def _read(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        if isinstance(ref := schema.get("$ref"), str):
            return self.of(_resolve(ref, self._root), depth)
        declared = schema.get("type")
        if declared is not None:
            names = declared if isinstance(declared, list) else [declared]
            return frozenset(name for name in names if isinstance(name, str))
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                found = [self.of(each, depth) for each in schema[key]]
                return frozenset().union(*found) if all(found) else ANY
        if isinstance(schema.get("allOf"), list):
            found = [self.of(each, depth) for each in schema["allOf"]]
            return next((each for each in found if each), ANY)
        if "const" in schema:
            return frozenset({type_of(schema["const"])})
        if isinstance(schema.get("enum"), list):
            return frozenset(map(type_of, schema["enum"]))
        return ANY


def _resolve(ref: str, root: Any) -> Any:
    found = root
    for part in ref.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def json_of(text: str, types: frozenset[str]) -> str:
    """``text`` as JSON of one of ``types``: unchanged if it is a value of these types, otherwise a
    string."""
    stripped = text.strip()
    stripped = _PYTHON_WORDS.get(stripped, stripped)
    try:
        kind = type_of(json.loads(stripped, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return json_string(text)
    if types == ANY:
        is_value = kind != "string"
    elif "string" in types:
        is_value = kind != "string" and kind in types | ({"integer"} if "number" in types else ANY)
    else:
        is_value = True  # of another type at worst, which the client may judge
    return stripped if is_value else json_string(text)


def json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
