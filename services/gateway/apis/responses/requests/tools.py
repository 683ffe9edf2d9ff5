"""The tools of a request to ``/v1/responses``, as tools of a chat."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw

from services.gateway.apis.responses.requests.conversation import INPUT, chat_name
from services.gateway.apis.responses.requests.schema import (
    AllowedTools,
    AnyInput,
    CustomTool,
    FunctionTool,
    GrammarInput,
    NamedCustom,
    NamedFunction,
    Namespace,
    ToolChoiceField,
)
from services.gateway.chat.requests import tool_schema as chat
from services.gateway.chat.requests.json_body import json_errors
from services.gateway.chat.requests.raw_json import NULL, json_text
from services.gateway.chat.requests.unsupported import unsupported
from services.gateway.http.violations import show, violation
from shared.errors import InvalidRequest
from shared.wire.messages import TOOL_NAME

Tool = FunctionTool | CustomTool | Namespace

KINDS = ("function", "custom", "namespace")
_NAME = re.compile(TOOL_NAME)


class _AnyTool(msgspec.Struct):
    type: str


@dataclass(frozen=True)
class ItemTools:
    """``for_chat`` are the tools as a chat has them, ``params`` by their names there the fields
    that they came as. A call of one of ``custom`` has a text for its arguments. ``in_namespaces``
    are the functions of namespaces: each with the name of its namespace and its own. ``warnings``
    name the grammars that the model sees and is not held to."""

    for_chat: Raw = field(default_factory=lambda: NULL)
    params: Mapping[str, str] = field(default_factory=dict)
    custom: frozenset[str] = frozenset()
    in_namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def field_names(self) -> dict[str, str]:
        """The names here of a chat's fields like ``tools[0].function``."""
        return {
            f"tools[{index}].function": param for index, param in enumerate(self.params.values())
        }


def read_tools(raw: Raw) -> ItemTools:
    """Raises InvalidRequest."""
    if raw == NULL or not (tools := _tools(raw)):
        return ItemTools()
    functions: list[dict[str, Any]] = []
    params: dict[str, str] = {}
    in_namespaces: dict[str, tuple[str, str]] = {}
    custom = frozenset(tool.name for tool in tools if isinstance(tool, CustomTool))
    for param, tool, namespace in _flat(tools):
        name = _checked_name(tool.name, namespace, param, params)
        params[name] = param
        if namespace is not None:
            in_namespaces[name] = namespace.name, tool.name
        function = _custom(tool) if isinstance(tool, CustomTool) else _function(tool)
        functions.append(function | {"name": name})
    whole = [{"type": "function", "function": function} for function in functions]
    warnings = tuple(
        f"tools[{index}].format: the model sees the grammar and is not held to it"
        for index, tool in enumerate(tools)
        if isinstance(tool, CustomTool) and isinstance(tool.format, GrammarInput)
        if tool.format.syntax == "lark"
    )
    for_chat = Raw(msgspec.json.encode(whole))
    return ItemTools(for_chat, params, custom, in_namespaces, warnings)


def _checked_name(
    own: str, namespace: Namespace | None, param: str, params: Mapping[str, str]
) -> str:
    name = chat_name(namespace.name if namespace is not None else None, own)
    if not _NAME.fullmatch(name):
        text = f"{param}.name becomes {show(name)}, of {len(name)} characters; the limit is 128"
        raise InvalidRequest(text, param=f"{param}.name")
    if name in params:
        text = f"{param}.name is {show(name)}, and so is {params[name]}.name"
        raise InvalidRequest(text, param=f"{param}.name")
    return name


def _flat(tools: list[Tool]) -> Iterator[tuple[str, FunctionTool | CustomTool, Namespace | None]]:
    """The tools one by one, each after its place in the request."""
    for index, tool in enumerate(tools):
        if isinstance(tool, Namespace):
            for number, function in enumerate(tool.tools):
                yield f"tools[{index}].tools[{number}]", function, tool
        else:
            yield f"tools[{index}]", tool, None


def chat_choice(choice: ToolChoiceField | None, tools: ItemTools) -> Any:
    """The field ``tool_choice`` of a chat. Raises InvalidRequest for an unknown tool."""
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
    if choice.name not in tools.params or is_custom != (choice.name in tools.custom):
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
    """A function with one text argument. An expression is enforced as the argument's schema; a
    grammar is only shown to the model, which writes the text inside its JSON."""
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
