"""Arguments of calls as literals in the syntax of a language other than JSON."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.tokenizer.guides.json_rule import json_rule
from services.tokenizer.guides.lark import Lark, literal
from services.tokenizer.guides.schema import Schema, guided
from services.tokenizer.guides.tools import Tool
from services.tokenizer.guides.values import (
    KINDS,
    Property,
    Values,
    as_json,
    kinds_of,
    parameters,
    properties,
)
from shared.dialects.formats import BareLayout

PYTHON_STRING = r"""/"([^"\\\n]|\\["'\\nrt])*"|'([^'\\\n]|\\["'\\nrt])*'/"""
PYTHON_NAME = r"/[A-Za-z_][A-Za-z0-9_]*/"
NUMBER = r"/-?(0|[1-9][0-9]{0,39})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,2})?/"
COMMA = r"/,[ ]?/"
COLON = r"/:[ ]?/"
BARE_KEY = r"/[A-Za-z0-9_$@.-]{1,256}/"


@dataclass(frozen=True, slots=True)
class Syntax:
    """``string`` is an expression for any string, ``write`` and ``write_key`` write a text;
    ``any_key`` is an expression for any key, ``words`` are the constants in JSON's terms."""

    string: str
    write: Callable[[str], str]
    any_key: str
    write_key: Callable[[str], str]
    words: dict[str, str]
    comma: str
    colon: str


class Literals:
    """Rules for values; objects in them have their properties in the order of the schema."""

    def __init__(self, lark: Lark, syntax: Syntax) -> None:
        self._lark = lark
        self._syntax = syntax
        self._rules: dict[int, str] = {}  # by schema
        self._any = ""

    def value(self, values: Values) -> str:
        if (listed := values.listed) is not None:
            return self._lark.rule(" | ".join(map(self._written, listed)))
        return self._lark.rule(" | ".join(self._one(values, each) for each in values.schemas))

    def any_value(self) -> str:
        if not self._any:
            self._any = self._lark.recursive(self._any_body)
        return self._any

    def _any_body(self, name: str) -> str:
        syntax, number = self._syntax, self._lark.terminal(NUMBER)
        words = " | ".join(map(literal, syntax.words.values()))
        lists = f"{self._array(name)} | {self._braced(self._members(name))}"
        return f"{syntax.string} | {number} | {words} | {lists}"

    def _one(self, values: Values, schema: Schema) -> str:
        """Values of one schema; a schema that leads back to itself has one rule."""
        if id(schema) not in self._rules:

            def body(name: str) -> str:
                self._rules[id(schema)] = name
                return self._body(values, schema)

            self._rules[id(schema)] = self._lark.recursive(body)
        return self._rules[id(schema)]

    def _body(self, values: Values, schema: Schema) -> str:
        kinds, syntax = kinds_of(schema), self._syntax
        if not kinds & set(KINDS):
            return self.any_value()
        words = {
            "string": syntax.string,
            "boolean": f"{literal(syntax.words['true'])} | {literal(syntax.words['false'])}",
            "null": literal(syntax.words["null"]),
        }
        found = [words[kind] for kind in sorted(kinds & words.keys())]
        if numbers := kinds & {"integer", "number"}:
            number = schema if numbers == kinds else {"type": sorted(numbers)}
            found.append(json_rule(self._lark, guided(number, values.is_strict)))
        if "array" in kinds:
            items = schema.get("items")
            item = self.value(values.of(items)) if isinstance(items, dict) else self.any_value()
            found.append(self._array(item))
        if "object" in kinds:
            found.append(self._object(values, schema))
        return " | ".join(found)

    def _array(self, item: str) -> str:
        return f'"[" ({self.repeated(item)})? "]"'

    def repeated(self, one: str) -> str:
        return f"{one} ({self._syntax.comma} {one})*"

    def _braced(self, members: str) -> str:
        return f'"{{" {members} "}}"'

    def _object(self, values: Values, schema: Schema) -> str:
        wanted = properties(values, schema)
        if wanted is None:
            extra = schema.get("additionalProperties")
            item = self.value(values.of(extra)) if isinstance(extra, dict) else self.any_value()
            return self._braced(self._members(item))
        return self._braced(self.in_order(wanted, self.member))

    def any_members(self) -> str:
        return self._members(self.any_value())

    def _members(self, item: str) -> str:
        """Members of an object with any keys."""
        one = f"{self._syntax.any_key} {self._syntax.colon} {item}"
        return f"({self.repeated(one)})?"

    def member(self, each: Property) -> str:
        key = self._syntax.write_key(each.name)
        return f"{key} {self._syntax.colon} {self.value(each.values)}"

    def in_order(self, wanted: list[Property], one: Callable[[Property], str]) -> str:
        """Properties separated by commas; optional ones may be left out."""
        first = rest = '""'
        for each in reversed(wanted):
            member, optional = self._lark.rule(one(each)), not each.is_required
            first, rest = (
                self._lark.rule(f"{member} {rest}{f' | {first}' * optional}"),
                self._lark.rule(f"{self._syntax.comma} {member} {rest}{f' | {rest}' * optional}"),
            )
        return first

    def _written(self, value: Any) -> str:
        syntax = self._syntax
        match value:
            case None | bool():
                return literal(syntax.words[as_json(value)])
            case str():
                return syntax.write(value)
            case list():
                items = f" {syntax.comma} ".join(map(self._written, value))
                return f'"[" {items} "]"'
            case dict():
                members = f" {syntax.comma} ".join(
                    f"{syntax.write_key(key)} {syntax.colon} {self._written(each)}"
                    for key, each in value.items()
                )
                return self._braced(members)
        return literal(as_json(value))


def pythonic_arguments(lark: Lark, tool: Tool) -> str:
    """``a=1, b="x")``: by name, in the order of the schema."""
    string = lark.terminal(PYTHON_STRING)
    syntax = Syntax(
        string=string,
        write=_json_text,
        any_key=string,
        write_key=_json_text,
        words={"true": "True", "false": "False", "null": "None"},
        comma=lark.terminal(COMMA),
        colon=lark.terminal(COLON),
    )
    literals, wanted = Literals(lark, syntax), parameters(tool)
    if wanted is None:
        one = lark.rule(f'{lark.terminal(PYTHON_NAME)} "=" {literals.any_value()}')
        return f'({literals.repeated(one)})? ")"'
    ordered = literals.in_order(
        wanted, lambda each: f"{literal(each.name)} {literal('=')} {literals.value(each.values)}"
    )
    return f'{ordered} ")"'


def bare_arguments(lark: Lark, layout: BareLayout, tool: Tool) -> str:
    """``a:1,b:<|"|>x<|"|>}``: in the order of the schema."""
    quote = lark.fixed(layout.quote)

    def quoted(text: str) -> str:
        return f"{quote} {literal(text)} {quote}"

    syntax = Syntax(
        string=lark.rule(f"{quote} {lark.lazy(layout.quote)}"),
        write=quoted,
        any_key=lark.terminal(BARE_KEY),
        write_key=lambda key: literal(key) if re.fullmatch(BARE_KEY[1:-1], key) else quoted(key),
        words={"true": "true", "false": "false", "null": "null"},
        comma=lark.terminal(COMMA),
        colon=lark.terminal(COLON),
    )
    literals, wanted = Literals(lark, syntax), parameters(tool)
    if wanted is None:
        return f'{literals.any_members()} "}}"'
    return f'{literals.in_order(wanted, literals.member)} "}}"'


def _json_text(text: str) -> str:
    return literal(as_json(text))
