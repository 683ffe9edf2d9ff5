"""Arguments of calls as text between markers: strings are written unquoted, and end at theirs."""

from collections.abc import Callable

from services.tokenizer.guides.json_rule import json_rule
from services.tokenizer.guides.lark import Lark, literal
from services.tokenizer.guides.tools import Tool
from services.tokenizer.guides.values import Values, as_json, parameters
from shared.dialects.formats import PairsLayout, TaggedLayout

ANY_KEY = r"/[^<>\"'=\s]{1,256}/"


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
        one(lark.fixed(each.name), lambda end, each=each: _value(lark, each.values, end))  # type: ignore[misc]
        + ("" if each.is_required else "?")
        for each in wanted
    )


def _value(lark: Lark, values: Values, end: str) -> str:
    """A value and the text that ends it: a string as it is, anything else as JSON."""
    if (listed := values.listed) is not None:
        texts = [each if isinstance(each, str) else as_json(each) for each in listed]
        return f"{lark.terminal(' | '.join(map(literal, texts)))} {lark.fixed(end)}"
    types = values.types
    if not types or "string" in types:
        return lark.lazy(end)
    return f"{json_rule(lark, values.json)} {lark.fixed(end)}"
