"""The tools of a request, as far as a grammar needs them."""

from dataclasses import dataclass
from typing import Any

import msgspec

from services.tokenizer.guides.limits import (
    Totals,
    check_limit,
    check_tool_name,
    invalid,
)
from services.tokenizer.guides.schema import Schema, checked, guided, read_json
from shared.wire.messages import MAX_TOOLS, ToolChoice

NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


class _Function(msgspec.Struct):
    name: str
    parameters: Any = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    function: _Function


@dataclass(frozen=True, slots=True)
class Tool:
    """``parameters`` is the schema of its arguments, read loosely unless ``is_strict``."""

    name: str
    parameters: Schema
    is_strict: bool
    param: str


def read_tools(text: str, choice: ToolChoice, totals: Totals) -> list[Tool]:
    """The callable tools. Raises InvalidRequest naming ``tools[…]`` or ``tool_choice``."""
    param = "tools"
    try:
        tools = msgspec.convert(read_json(text, param), list[_Tool])
    except msgspec.ValidationError as error:
        raise invalid(param, str(error)) from None
    check_limit(param, "tools", len(tools), MAX_TOOLS)
    if unknown := set(choice.names) - {tool.function.name for tool in tools}:
        raise invalid("tool_choice", f"no tool has the name {min(unknown)[:140]!r}")
    return [
        _read(tool.function, f"{param}[{index}].function", totals)
        for index, tool in enumerate(tools)
        if not choice.names or tool.function.name in choice.names
    ]


def _read(function: _Function, param: str, totals: Totals) -> Tool:
    check_tool_name(f"{param}.name", function.name)
    schema = NO_PARAMETERS
    if function.parameters is not None:
        schema = checked(function.parameters, f"{param}.parameters", totals, bool(function.strict))
    return Tool(function.name, schema, bool(function.strict), param)


def arguments(tool: Tool) -> Schema:
    """The schema of the object of its arguments, with llguidance's options."""
    return guided({"type": "object"} | tool.parameters, tool.is_strict)
