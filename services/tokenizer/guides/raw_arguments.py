"""Arguments of calls in formats other than JSON: strings are written unquoted, and end at their
marker."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from services.tokenizer.guides.json_rule import json_rule
from services.tokenizer.guides.lark import Lark, literal
from services.tokenizer.guides.limits import MAX_CHAIN
from services.tokenizer.guides.schema import Schema, find, guided
from services.tokenizer.guides.tools import Tool
from shared.dialects.formats import PairsLayout, TaggedLayout

ANY_KEY = r"/[^<>\"'=\s]{1,256}/"
PYTHON_STRING = r"""/"([^"\\\n]|\\.)*"|'([^'\\\n]|\\.)*'/"""
PYTHON_NUMBER = r"/-?[0-9]{1,40}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,4})?/"
PYTHON_COMMA = r"/,[ ]?/"


@dataclass(frozen=True, slots=True)
class Parameter:
    """The value matches one of ``schemas``; ``root`` is the document of their references. They are
    read loosely unless ``is_strict``."""

    name: str
    is_required: bool
    schemas: list[Schema]
    root: Schema
    is_strict: bool

    @property
    def json(self) -> Schema:
        """The schema of a JSON value, with llguidance's options."""
        definitions = {
            name: self.root[name] for name in ("$defs", "definitions") if name in self.root
        }
        return guided(definitions | {"anyOf": self.schemas}, self.is_strict)

    @property
    def types(self) -> set[str]:
        """The types of JSON that it may have; empty: any."""
        found: set[str] = set()
        for schema in self.schemas:
            kinds = schema.get("type")
            kinds = [kinds] if isinstance(kinds, str) else kinds
            if not isinstance(kinds, list) or not kinds:
                return set()
            found |= {str(kind) for kind in kinds}
        return found

    @property
    def values(self) -> list[Any] | None:
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


def parameters(tool: Tool) -> list[Parameter] | None:
    """None if any parameters are allowed."""
    root = tool.parameters
    (schema, *others) = _alternatives(root, root)
    properties, required = schema.get("properties"), schema.get("required")
    if others or not isinstance(properties, dict):
        return None
    listed = required if isinstance(required, list) else []
    names = {each for each in listed if isinstance(each, str)}
    return [
        Parameter(
            name,
            name in names,
            _alternatives(root, each) if isinstance(each, dict) else [{}],
            root,
            tool.is_strict,
        )
        for name, each in properties.items()
    ]


def tagged_arguments(lark: Lark, layout: TaggedLayout, tool: Tool) -> str:
    """Parameters and ``</function>``."""
    after_name = f"{layout.name_close}{layout.value_padding}"
    end, line_end = f"{layout.value_padding}{layout.parameter_close}", layout.line_end

    def parameter(key: str, value: Callable[[str], str]) -> str:
        words = [lark.fixed(layout.parameter_open), key, lark.fixed(after_name), value(end)]
        return lark.rule(" ".join([*words, lark.fixed(line_end)]))

    return f"{_all(lark, tool, parameter)} {lark.fixed(layout.function_close)}"


def pair_arguments(lark: Lark, layout: PairsLayout, tool: Tool) -> str:
    """``<arg_key>k</arg_key>`` and ``<arg_value>v</arg_value>`` in turn."""
    between = f"{layout.key_close}{layout.line_end}{layout.value_open}"

    def parameter(key: str, value: Callable[[str], str]) -> str:
        words = [lark.fixed(layout.key_open), key, lark.fixed(between), value(layout.value_close)]
        return lark.rule(" ".join([*words, lark.fixed(layout.line_end)]))

    return _all(lark, tool, parameter)


def _all(lark: Lark, tool: Tool, one: Callable[[str, Callable[[str], str]], str]) -> str:
    """All parameters in the order of the schema; ``one`` writes one parameter, given its key and a
    function that writes its value before a given end."""
    wanted = parameters(tool)
    if wanted is None:
        return f"{one(lark.terminal(ANY_KEY), lark.lazy)}*"
    return " ".join(
        one(lark.fixed(each.name), lambda end, each=each: _value(lark, each, end))  # type: ignore[misc]
        + ("" if each.is_required else "?")
        for each in wanted
    )


def _value(lark: Lark, parameter: Parameter, end: str) -> str:
    """A value and the text that ends it: a string as it is, anything else as JSON."""
    if (values := parameter.values) is not None:
        texts = [each if isinstance(each, str) else _json(each) for each in values]
        return f"{lark.terminal(' | '.join(map(literal, texts)))} {lark.fixed(end)}"
    types = parameter.types
    if not types or "string" in types:
        return lark.lazy(end)
    return f"{json_rule(lark, parameter.json)} {lark.fixed(end)}"


def pythonic_arguments(lark: Lark, tool: Tool) -> str:
    """``a=1, b="x")``: by name, in the order of the schema."""
    wanted, comma = parameters(tool), lark.terminal(PYTHON_COMMA)
    if wanted is None:
        one = lark.rule(f'{lark.terminal("/[A-Za-z_][A-Za-z0-9_]*/")} "=" {python_value(lark)}')
        return f'({one} ({comma} {one})*)? ")"'
    first = rest = '""'
    for each in reversed(wanted):
        one = lark.rule(f"{literal(each.name)} {literal('=')} {_python(lark, each)}")
        optional = not each.is_required
        first, rest = (
            lark.rule(f"{one} {rest}{f' | {first}' * optional}"),
            lark.rule(f"{comma} {one} {rest}{f' | {rest}' * optional}"),
        )
    return f'{first} ")"'


def _python(lark: Lark, parameter: Parameter) -> str:
    if (values := parameter.values) is not None:
        return lark.terminal(" | ".join(literal(_python_literal(each)) for each in values))
    types = parameter.types
    if not types or types & {"array", "object"}:
        return python_value(lark)
    kinds = {
        "string": lark.terminal(PYTHON_STRING),
        "boolean": '"True" | "False"',
        "null": '"None"',
    }
    words = [kinds[each] for each in sorted(types & kinds.keys())]
    if numbers := sorted(types - kinds.keys()):
        of_numbers = guided({"type": numbers}, is_strict=True)
        words.append(json_rule(lark, parameter.json if types == set(numbers) else of_numbers))
    return lark.rule(" | ".join(words))


def python_value(lark: Lark) -> str:
    """Any literal of Python."""
    text, comma = lark.terminal(PYTHON_STRING), lark.terminal(PYTHON_COMMA)
    simple = f'{text} | {lark.terminal(PYTHON_NUMBER)} | "True" | "False" | "None"'
    return lark.recursive(
        lambda value: (
            f'{simple} | "[" ({value} ({comma} {value})*)? "]"'
            f' | "{{" ({text} /:[ ]?/ {value} ({comma} {text} /:[ ]?/ {value})*)? "}}"'
        )
    )


def _python_literal(value: Any) -> str:
    match value:
        case True | False | None:
            return str(value)
    return _json(value)


def _json(value: Any) -> str:
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
            unseen += [member if isinstance(member, dict) else {} for member in members]
        else:
            found.append(each)
        if len(unseen) > MAX_CHAIN:
            return [{}]
    return found
