"""The tools of a chat, and which of them may or must be called."""

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from services.gateway.chat.requests.json_body import json_errors
from services.gateway.chat.requests.raw_json import NULL, check_chars, json_text
from services.gateway.chat.requests.schema import ChatRequest, TokenizeRequest
from services.gateway.chat.requests.tool_schema import (
    AllowedToolsChoice,
    Function,
    FunctionName,
    FunctionTool,
    NamedTool,
)
from services.gateway.http.violations import show, violation
from shared.errors import InvalidRequest
from shared.wire.messages import MAX_TOOLS, ModelInfo, ToolChoice


@dataclass(frozen=True, slots=True)
class Tools:
    """``tools`` is the JSON array for the chat template; empty: there are none.

    ``is_named``: the client wants a call of one function, which it names. ``is_legacy``: it sent
    OpenAI's older fields and reads the older ones of a reply.
    """

    tools: str = ""
    choice: ToolChoice | None = None
    is_named: bool = False
    is_legacy: bool = False


def requested_tools(request: ChatRequest, model: ModelInfo) -> Tools:
    """Raises InvalidRequest."""
    tools, names = _tools(request.tools)
    functions, function_names = _functions(request.functions)
    if tools and functions:
        raise InvalidRequest("tools and functions are both given", param="functions")
    if functions:
        _refuse(request.tool_choice, "tool_choice", "functions have function_call")
        return _legacy(request, functions, function_names, model)
    _refuse(request.function_call, "function_call", "it is allowed with functions only")
    if not tools:
        _refuse(request.tool_choice, "tool_choice", "it is allowed with tools only")
        return Tools()
    choice = _choice(request.tool_choice, names, request.parallel_tool_calls is not False)
    _check_parser(choice, "tools", model)
    return Tools(tools, choice, isinstance(request.tool_choice, NamedTool))


def offered_tools(request: TokenizeRequest) -> str:
    """The JSON array for the chat template. Raises InvalidRequest."""
    return _tools(request.tools)[0]


def _legacy(request: ChatRequest, functions: str, names: set[str], model: ModelInfo) -> Tools:
    """Functions are called one at a time."""
    asked = request.function_call
    if isinstance(asked, FunctionName):
        _check_known(asked.name, names, "function_call.name")
        choice = ToolChoice("required", [asked.name], is_parallel=False)
    else:
        choice = ToolChoice(asked or "auto", is_parallel=False)
    _check_parser(choice, "functions", model)
    return Tools(functions, choice, isinstance(asked, FunctionName), is_legacy=True)


def _refuse(choice: object, param: str, reason: str) -> None:
    """Lets pass what does not ask for a call: none and auto."""
    if choice not in (None, "none", "auto"):
        shown = show(choice if isinstance(choice, str) else msgspec.to_builtins(choice))
        raise InvalidRequest(f"{param} is {shown}; {reason}", param=param)


def _check_parser(choice: ToolChoice, param: str, model: ModelInfo) -> None:
    if choice.kind != "none" and not model.tool_parser:
        raise InvalidRequest(
            f"{param} cannot be called by this model: it has no tool-call-parser; without calls"
            " only tool_choice none is allowed",
            param=param,
        )


def _choice(asked: object, names: set[str], is_parallel: bool) -> ToolChoice:
    match asked:
        case NamedTool(FunctionName(name)):
            _check_known(name, names, "tool_choice.function.name")
            return ToolChoice("required", [name], is_parallel=False)
        case AllowedToolsChoice(allowed):
            for number, tool in enumerate(allowed.tools):
                param = f"tool_choice.allowed_tools.tools[{number}].function.name"
                _check_known(tool.function.name, names, param)
            allowed_names = [tool.function.name for tool in allowed.tools]
            return ToolChoice(allowed.mode, allowed_names, is_parallel)
        case "none" | "required":
            return ToolChoice(asked, is_parallel=is_parallel)
        case _:
            return ToolChoice("auto", is_parallel=is_parallel)


def _check_known(name: str, names: set[str], param: str) -> None:
    if name not in names:
        raise InvalidRequest(f"{param} is {show(name)}; no tool has this name", param=param)


def _tools(raw: Raw) -> tuple[str, set[str]]:
    if raw == NULL:
        return "", set()
    tools, text = _items(raw, FunctionTool, "tools")
    return text, {tool.function.name for tool in tools}


def _functions(raw: Raw) -> tuple[str, set[str]]:
    if raw == NULL:
        return "", set()
    functions, text = _items(raw, Function, "functions")
    if not functions:
        return "", set()
    whole: list[Raw] = msgspec.json.decode(text, type=list[Raw])
    tools = [{"type": "function", "function": each} for each in whole]
    array = check_chars(msgspec.json.encode(tools).decode(), "functions")
    return array, {function.name for function in functions}


@json_errors()
def _items(raw: Raw, kind: Any, param: str) -> tuple[list[Any], str]:
    """The items, each of ``kind``, and their array as it came; an empty one is none."""
    text = json_text(raw, param)
    try:
        items = msgspec.json.decode(text, type=list[kind])
    except msgspec.ValidationError as error:
        raise violation(error, param, msgspec.json.decode(text), kind) from None
    if len(items) > MAX_TOOLS:
        raise InvalidRequest(
            f"{param} has {len(items)} items; the limit is {MAX_TOOLS}", param=param
        )
    return (items, text) if items else ([], "")
