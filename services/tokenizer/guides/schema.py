"""JSON schemas of clients: read, freed of keywords without effect on a text, and measured."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import msgspec

from services.tokenizer.guides.limits import (
    MAX_CHAIN,
    MAX_DEPTH,
    Param,
    Place,
    Totals,
    check_limit,
    check_regex,
    invalid,
)
from services.tokenizer.guides.looser import loosen, probes_of

DEFAULT_WHITESPACE = r"[ ]{1,2}|\n[ \t]{0,24}"

OPTIONS = "x-guidance"
ANNOTATIONS = {"description", "title", "examples", "default", "$comment", OPTIONS}
SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
DATA = {"enum", "const", "required"}
APPLICATORS = ("allOf", "anyOf", "oneOf")
NAMES = {"properties", "patternProperties"}
OTHERS = {*APPLICATORS, "$ref", "if", "dependentSchemas"}
EXTRAS = {"additionalProperties", "patternProperties", "unevaluatedProperties"}

_INDEX = re.compile("[0-9]{1,9}")

Schema = dict[str, Any]


def read_json(text: str, param: str) -> Any:
    """Raises InvalidRequest for invalid JSON or JSON nested too deep to be read."""
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise invalid(param, f"it nests too deep; the limit is {MAX_DEPTH}") from None
    except msgspec.DecodeError as error:
        raise invalid(param, f"it is no JSON: {error}") from None


def checked(schema: Any, param: str, totals: Totals, is_strict: bool = True) -> Schema:
    """The schema without annotations and, unless it ``is_strict``, without keywords that no grammar
    can express; its objects are closed unless that restricts another schema. Raises InvalidRequest
    naming the place and the limit."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise invalid(param, "a JSON schema is an object")
    kept, schemas = _copied(schema, param, totals)
    if not is_strict:
        _loosen(kept, schemas, totals)
    totals.add_schema(param, len(msgspec.json.encode(kept)))
    _check_chains(kept, schemas)
    _close([schema for _, schema in schemas])
    return kept


def _loosen(root: Schema, schemas: list[tuple[Param, Schema]], totals: Totals) -> None:
    for path, schema in schemas:
        totals.probes.update(probe for _, probe in probes_of(schema))
        for name in loosen(schema, lambda reference: find(root, reference), totals.unheld):
            totals.left_out.append(str(Place(path, f".{name}")))


def guided(schema: Schema, is_strict: bool, whitespace: str | None = None) -> Schema:
    """With llguidance's options: the text allowed between the parts, and keywords to ignore."""
    options: Schema = {"whitespace_pattern": whitespace or DEFAULT_WHITESPACE}
    if not is_strict:
        options |= {"lenient": True, "coerce_one_of": True}
    return schema | {OPTIONS: options}


def _copied(root: Schema, param: str, totals: Totals) -> tuple[Schema, list[tuple[Param, Schema]]]:
    """A copy without annotations, and all schemas in it with their places. Iterative: a stack would
    overflow before the depth is known."""
    holder: list[Any] = [root]
    schemas: list[tuple[Param, Schema]] = []
    unseen: list[tuple[Any, Any, Param, int, str]] = [(holder, 0, param, 1, "schema")]
    while unseen:
        parent, key, path, depth, role = unseen.pop()
        value = parent[key]
        if isinstance(value, list):
            _check_depth(path, depth)
            parent[key] = kept_list = list(value)
            unseen += [
                (kept_list, index, Place(path, f"[{index}]"), depth + 1, role)
                for index in range(len(kept_list))
            ]
        elif isinstance(value, dict):
            _check_depth(path, depth)
            is_schema = role == "schema"
            parent[key] = kept = {
                name: child
                for name, child in value.items()
                if not (is_schema and name in ANNOTATIONS)
            }
            if is_schema:
                schemas.append((path, kept))
                _count(kept, path, totals)
            unseen += [
                (kept, name, Place(path, f".{name}"), depth + 1, _role(role, name)) for name in kept
            ]
    return holder[0], schemas


def _role(parent: str, name: str) -> str:
    match parent:
        case "names":
            return "schema"
        case "schema" if name in SCHEMAS_BY_NAME:
            return "names"
        case "schema" if name not in DATA:
            return "schema"
    return "data"


def _check_depth(path: Param, depth: int) -> None:
    check_limit(path, "levels of JSON", depth, MAX_DEPTH)


def _count(schema: Schema, path: Param, totals: Totals) -> None:
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict):
        listed = required if isinstance(required, list) else []
        names = {each for each in listed if isinstance(each, str)}
        num_optional = sum(name not in names for name in properties)
        totals.add_properties(path, len(properties), num_optional)
    if isinstance(values := schema.get("enum"), list):
        totals.add_enum(path, len(values), len(msgspec.json.encode(values)))
    if isinstance(pattern := schema.get("pattern"), str):
        check_regex(Place(path, ".pattern"), pattern)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        for pattern in patterns:
            check_regex(Place(path, ".patternProperties"), pattern)


def _close(schemas: list[Schema]) -> None:
    """Allows no properties but the named ones, unless a schema says otherwise: models that may
    write others do. All stay open if two schemas apply to one object."""
    if any("allOf" in each or (each.keys() & NAMES and each.keys() & OTHERS) for each in schemas):
        return
    for schema in schemas:
        if "properties" in schema and not schema.keys() & EXTRAS:
            schema["additionalProperties"] = False


def _check_chains(root: Schema, schemas: list[tuple[Param, Schema]]) -> None:
    """Raises InvalidRequest if schemas refer to one another, without a property or an item between,
    in a circle or in a chain that is too long."""
    lengths: dict[int, int] = {}
    for path, schema in schemas:
        open_ids: set[int] = set()
        stack = [(schema, _same_value(root, schema))]
        while stack:
            here, rest = stack[-1]
            open_ids.add(id(here))
            following = next(rest, None)
            if following is None:
                stack.pop()
                open_ids.discard(id(here))
                nexts = (lengths[id(each)] for each in _same_value(root, here))
                lengths[id(here)] = 1 + max(nexts, default=0)
                check_limit(path, "schemas that refer to one another", lengths[id(here)], MAX_CHAIN)
            elif id(following) in open_ids:
                raise invalid(path, "a schema refers to itself with nothing between")
            elif id(following) not in lengths:
                stack.append((following, _same_value(root, following)))


def _same_value(root: Schema, schema: Schema) -> Iterator[Schema]:
    """The schemas that hold for the same value as ``schema``, and that it names itself."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and isinstance(found := find(root, reference), dict):
        yield found
    for name in APPLICATORS:
        if isinstance(members := schema.get(name), list):
            yield from (each for each in members if isinstance(each, dict))


def find(root: Schema, reference: str) -> Any:
    """The target of a JSON pointer within the document, or None."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    value: Any = root
    for step in unquote(reference[2:]).split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and _INDEX.fullmatch(name) and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value
