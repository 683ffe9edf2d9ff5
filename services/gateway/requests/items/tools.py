"""The tools of a request to ``/v1/responses``, as those of a chat."""

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from services.gateway.requests import tool_schema as chat
from services.gateway.requests.items.conversation import INPUT
from services.gateway.requests.items.schema import (
    AllowedTools,
    AnyInput,
    CustomTool,
    FunctionTool,
    GrammarInput,
    NamedCustom,
    NamedFunction,
    ToolChoiceField,
)
from services.gateway.requests.json_body import json_errors
from services.gateway.requests.raw_json import NULL, json_text
from services.gateway.requests.unsupported import unsupported
from services.gateway.requests.violations import show, violation
from shared.errors import InvalidRequest

Tool = FunctionTool | CustomTool

KINDS = ("function", "custom")


class _AnyTool(msgspec.Struct):
    type: str


@dataclass(frozen=True)
class ItemTools:
    """``for_chat`` are the tools as a chat has them; a call of one of ``custom`` has a text for its
    arguments."""

    for_chat: Raw
    names: frozenset[str] = frozenset()
    custom: frozenset[str] = frozenset()


def read_tools(raw: Raw) -> ItemTools:
    """Raises InvalidRequest."""
    if raw == NULL or not (tools := _tools(raw)):
        return ItemTools(NULL)
    custom = frozenset(tool.name for tool in tools if isinstance(tool, CustomTool))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in custom and names.index(name) != index:
            param = f"tools[{index}].name"
            raise InvalidRequest(f"{param} is {show(name)}, and so is an earlier one", param=param)
    functions = [
        _custom(tool) if isinstance(tool, CustomTool) else _function(tool) for tool in tools
    ]
    whole = [{"type": "function", "function": function} for function in functions]
    return ItemTools(Raw(msgspec.json.encode(whole)), frozenset(names), custom)


def chat_choice(choice: ToolChoiceField | None, tools: ItemTools) -> Any:
    """The field ``tool_choice`` of a chat. Raises InvalidRequest for a tool that is none."""
    match choice:
        case NamedFunction() | NamedCustom():
            return chat.NamedTool(_known(choice, tools, "tool_choice.name"))
        case AllowedTools(mode, allowed):
            named = [
                chat.NamedTool(_known(each, tools, f"tool_choice.tools[{number}].name"))
                for number, each in enumerate(allowed)
            ]
            return chat.AllowedToolsChoice(chat.AllowedTools(mode, named))
        case _:
            return choice


def _known(choice: NamedFunction | NamedCustom, tools: ItemTools, param: str) -> chat.FunctionName:
    is_custom = isinstance(choice, NamedCustom)
    if choice.name not in tools.names or is_custom != (choice.name in tools.custom):
        kind = "custom tool" if is_custom else "function"
        raise InvalidRequest(
            f"{param} is {show(choice.name)}; no {kind} has this name", param=param
        )
    return chat.FunctionName(choice.name)


@json_errors()
def _tools(raw: Raw) -> list[Tool]:
    text = json_text(raw, "tools")
    try:
        for index, tool in enumerate(msgspec.json.decode(text, type=list[_AnyTool])):
            if tool.type not in KINDS:
                raise unsupported(f"tools[{index}].type", tool.type, " or ".join(map(show, KINDS)))
        return msgspec.json.decode(text, type=list[Tool])
    except msgspec.ValidationError as error:
        raise violation(error, "tools", msgspec.json.decode(text), Tool) from None


def _function(tool: FunctionTool) -> dict[str, Any]:
    fields = msgspec.structs.asdict(tool)
    return {name: value for name, value in fields.items() if value is not None}


def _custom(tool: CustomTool) -> dict[str, Any]:
    """A function of one text. An expression is held as that of its schema; a grammar is only shown
    to the model, which writes the text as a part of its JSON."""
    parts = [tool.description] if tool.description else []
    schema: dict[str, Any] = {"type": "string"}
    match tool.format:
        case GrammarInput("regex", definition):
            schema["pattern"] = f"^(?:{definition})$"
        case GrammarInput(_, definition):
            parts.append(f"The {INPUT} follows this Lark grammar:\n{definition}")
        case AnyInput() | None:
            pass
    return {
        "name": tool.name,
        "description": "\n\n".join(parts),
        "parameters": {
            "type": "object",
            "properties": {INPUT: schema},
            "required": [INPUT],
            "additionalProperties": False,
        },
        "strict": "pattern" in schema,
    }
