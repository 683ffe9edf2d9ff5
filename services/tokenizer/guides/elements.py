"""Arguments of calls as elements, which may be in each other."""

from services.tokenizer.guides.json_rule import DEFINITIONS, json_rule
from services.tokenizer.guides.lark import Lark, literal
from services.tokenizer.guides.raw_arguments import one_of
from services.tokenizer.guides.schema import Schema, guided
from services.tokenizer.guides.tools import Tool
from services.tokenizer.guides.values import (
    Property,
    Values,
    kinds_of,
    parameters,
    properties,
)
from shared.dialects.formats import ElementsLayout


class Elements:
    """Rules for elements, each with the text that ends it. A key that no schema names would have to
    be written twice, so that such objects are JSON, and a tool with any parameters gets none."""

    def __init__(self, lark: Lark, layout: ElementsLayout) -> None:
        self._lark = lark
        self._layout = layout
        self._rules: dict[tuple[int, str], str] = {}  # by schema and name

    def arguments(self, tool: Tool) -> str:
        """The parameters in the order of the schema, and the end of the function."""
        wanted = parameters(tool) or []
        return f"{self._all(wanted)} {self._lark.fixed(self._layout.function_close)}"

    def _all(self, wanted: list[Property]) -> str:
        return " ".join(
            self._element(each.name, each.values) + ("" if each.is_required else "?")
            for each in wanted
        )

    def _element(self, name: str, values: Values) -> str:
        opening = self._lark.fixed(f"{self._layout.tag_open}{name}{self._layout.tag_close}")
        return self._lark.rule(f"{opening} {self._value(name, values)}")

    def _value(self, name: str, values: Values) -> str:
        end = self._lark.fixed(self._end(name))
        if (listed := values.listed) is not None:
            return f"{one_of(self._lark, listed)} {end}"
        return self._lark.rule(" | ".join(self._one(name, values, each) for each in values.schemas))

    def _end(self, name: str) -> str:
        return f"{self._layout.tag_open}/{name}{self._layout.tag_close}"

    def _one(self, name: str, values: Values, schema: Schema) -> str:
        """Values of one schema; a schema that leads back to itself has one rule for each name."""
        key = (id(schema), name)
        if key not in self._rules:

            def body(rule: str) -> str:
                self._rules[key] = rule
                return self._body(name, values, schema)

            self._rules[key] = self._lark.recursive(body)
        return self._rules[key]

    def _body(self, name: str, values: Values, schema: Schema) -> str:
        kinds, end = kinds_of(schema), self._lark.fixed(self._end(name))
        if not kinds or "string" in kinds:
            rest = self._end(name).removeprefix(self._layout.tag_open)
            return f"{self._lark.lazy(self._layout.tag_open)} {literal(rest)}"
        ways = []
        wanted = properties(values, schema) if "object" in kinds else None
        if wanted is not None:
            ways.append(f"{self._all(wanted)} {end}")
            kinds -= {"object"}
        if "array" in kinds and isinstance(items := schema.get("items"), dict):
            ways.append(f"{self._element(self._layout.item, values.of(items))}* {end}")
            kinds -= {"array"}
        if kinds:
            json = guided(schema | {"type": sorted(kinds)}, values.is_strict)
            definitions = {name: values.root[name] for name in DEFINITIONS if name in values.root}
            ways.append(f"{json_rule(self._lark, definitions | json)} {end}")
        return " | ".join(ways)
