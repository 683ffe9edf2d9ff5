"""Arguments of calls as text between markers: strings are written unquoted, and end at theirs."""

from collections.abc import Callable
from functools import partial

from services.tokenizer.guides.json_rule import json_rule
from services.tokenizer.guides.lark import Lark, literal
from services.tokenizer.guides.tools import Tool
from services.tokenizer.guides.values import Values, as_json, parameters
from shared.dialects.formats import PairsLayout, TaggedLayout

ANY_KEY = r"/[^<>\"'=\s]{1,256}/"

# Writes a value, given the text that ends it and the padding before that.
Value = Callable[[str, str], str]


def tagged_arguments(lark: Lark, layout: TaggedLayout, tool: Tool) -> str:
    """Parameters and ``</function>``."""
    padding = layout.value_padding
    after_name = lark.fixed(f"{layout.name_close}{padding}")

    def parameter(key: str, value: Value) -> str:
        words = [lark.fixed(layout.parameter_open), key, after_name]
        words += [value(layout.parameter_close, padding), lark.fixed(layout.line_end)]
        return lark.rule(" ".join(words))

    return f"{_all(lark, tool, parameter)} {lark.fixed(layout.function_close)}"


def pair_arguments(lark: Lark, layout: PairsLayout, tool: Tool) -> str:
    """``<arg_key>k</arg_key>`` and ``<arg_value>v</arg_value>`` in turn."""
    between = f"{layout.key_close}{layout.line_end}{layout.value_open}"

    def parameter(key: str, value: Value) -> str:
        words = [lark.fixed(layout.key_open), key, lark.fixed(between)]
        words += [value(layout.value_close, ""), lark.fixed(layout.line_end)]
        return lark.rule(" ".join(words))

    return _all(lark, tool, parameter)


def _all(lark: Lark, tool: Tool, one: Callable[[str, Value], str]) -> str:
    """All parameters in the order of the schema; ``one`` writes one, given its key and value."""
    wanted = parameters(tool)
    if wanted is None:
        return f"{one(lark.terminal(ANY_KEY), lark.lazy)}*"
    return " ".join(
        one(lark.fixed(each.name), partial(_value, lark, each.values))
        + ("" if each.is_required else "?")
        for each in wanted
    )


def _value(lark: Lark, values: Values, end: str, padding: str) -> str:
    """A string as it is, anything else as JSON."""
    if (listed := values.listed) is not None:
        texts = [each if isinstance(each, str) else as_json(each) for each in listed]
        return f"{lark.terminal(' | '.join(map(literal, texts)))} {lark.fixed(padding + end)}"
    types = values.types
    if not types or "string" in types:
        return lark.lazy(end, padding)
    return f"{json_rule(lark, values.json)} {lark.fixed(padding + end)}"
