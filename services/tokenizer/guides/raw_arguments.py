"""Arguments of calls as text between markers: strings are written unquoted, and end at theirs."""

from collections.abc import Callable, Mapping
from typing import Any

from services.tokenizer.guides.json_rule import json_rule
from services.tokenizer.guides.lark import Lark, literal
from services.tokenizer.guides.tools import Tool
from services.tokenizer.guides.values import ANY, KINDS, Values, as_json, parameters
from shared.dialects.formats import PairsLayout, TaggedLayout
from shared.text.json_types import type_of

NO_ESCAPES: Mapping[str, str] = {}
ANY_KEY = r"/[^<>\"'=\s]{1,256}/"


def tagged_arguments(lark: Lark, layout: TaggedLayout, tool: Tool) -> str:
    """Parameters and ``</function>``."""
    padding = layout.value_padding
    after_name = lark.fixed(f"{layout.name_close}{padding}")
    types = (lark.fixed(layout.type_open), layout.type_words, after_name)

    def parameter(key: str, values: Values | None) -> str:
        words = [lark.fixed(layout.parameter_open), key]
        if layout.type_open:
            words.append(_typed(lark, values, types, layout.parameter_close))
        else:
            words += [after_name, _value(lark, values, layout.parameter_close, padding)]
        return lark.rule(" ".join([*words, lark.fixed(layout.line_end)]))

    return f"{_all(lark, tool, parameter, layout.escapes)} {lark.fixed(layout.function_close)}"


def pair_arguments(lark: Lark, layout: PairsLayout, tool: Tool) -> str:
    """``<arg_key>k</arg_key>`` and ``<arg_value>v</arg_value>`` in turn."""
    between = f"{layout.key_close}{layout.line_end}{layout.value_open}"

    def parameter(key: str, values: Values | None) -> str:
        words = [lark.fixed(layout.key_open), key, lark.fixed(between)]
        words += [_value(lark, values, layout.value_close), lark.fixed(layout.line_end)]
        return lark.rule(" ".join(words))

    return _all(lark, tool, parameter)


def _all(
    lark: Lark,
    tool: Tool,
    one: Callable[[str, Values | None], str],
    escapes: Mapping[str, str] = NO_ESCAPES,
) -> str:
    """All parameters in the order of the schema; ``one`` writes one, given its key and values."""
    wanted = parameters(tool)
    if wanted is None:
        return f"{one(lark.terminal(ANY_KEY), None)}*"
    words = []
    for each in wanted:
        key = each.name
        for char, escape in escapes.items():
            key = key.replace(char, escape)
        words.append(one(lark.fixed(key), each.values) + ("" if each.is_required else "?"))
    return " ".join(words)


def _value(lark: Lark, values: Values | None, end: str, padding: str = "") -> str:
    """A value and the text that ends it: a string as it is, anything else as JSON; without
    ``values`` any."""
    if values is not None and (listed := values.listed) is not None:
        return f"{one_of(lark, listed)} {lark.fixed(padding + end)}"
    if values is None or not values.types or "string" in values.types:
        return lark.lazy(end, padding)
    return f"{json_rule(lark, values.json)} {lark.fixed(padding + end)}"


def _typed(
    lark: Lark, values: Values | None, types: tuple[str, Mapping[str, str], str], end: str
) -> str:
    """The word for the type, a value of the type, and ``end``."""
    opening, words, after = types
    values = values or Values([ANY], ANY, is_strict=False)
    listed, kinds = values.listed, values.types or set(KINDS)
    if listed is not None:
        kinds = set(map(type_of, listed))
    ways = []
    for word in dict.fromkeys(words[kind] for kind in KINDS if kind in kinds):
        here = {kind for kind in kinds if words[kind] == word}
        if listed is not None:
            value = one_of(lark, [each for each in listed if type_of(each) in here])
            value = f"{value} {lark.fixed(end)}"
        elif here == {"string"}:
            value = lark.lazy(end)
        else:
            value = f"{json_rule(lark, values.json_of(here))} {lark.fixed(end)}"
        ways.append(f"{literal(word)} {after} {value}")
    return f"{opening} {lark.rule(' | '.join(ways))}"


def one_of(lark: Lark, listed: list[Any]) -> str:
    texts = [each if isinstance(each, str) else as_json(each) for each in listed]
    return lark.terminal(" | ".join(map(literal, texts)))
