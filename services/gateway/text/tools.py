"""The tools of a chat, and the choice among them."""

import msgspec
from msgspec import Raw

from services.gateway.chat.requests.chat_options import items_of, listed_tools
from services.gateway.chat.requests.raw_json import NULL, check_chars
from services.gateway.chat.requests.schema import ChatRequest
from services.gateway.chat.requests.tool_schema import (
    AllowedToolsChoice,
    Function,
    FunctionName,
    NamedTool,
)
from services.gateway.chat.structure import Tools
from services.gateway.http.violations import show
from shared.errors import InvalidRequest
from shared.wire.messages import ModelInfo, ToolChoice


def requested_tools(request: ChatRequest, model: ModelInfo) -> Tools:
    """Raises InvalidRequest."""
    tools, names = listed_tools(request.tools)
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


def _legacy(request: ChatRequest, functions: str, names: set[str], model: ModelInfo) -> Tools:
    """Legacy functions are called one at a time."""
    asked = request.function_call
    if isinstance(asked, FunctionName):
        _check_known(asked.name, names, "function_call.name")
        choice = ToolChoice("required", [asked.name], is_parallel=False)
    else:
        choice = ToolChoice(asked or "auto", is_parallel=False)
    _check_parser(choice, "functions", model)
    return Tools(functions, choice, isinstance(asked, FunctionName), is_legacy=True)


def _refuse(choice: object, param: str, reason: str) -> None:
    """Refuses a choice that asks for a call; ``none`` and ``auto`` pass."""
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


def _functions(raw: Raw) -> tuple[str, set[str]]:
    if raw == NULL:
        return "", set()
    functions, text = items_of(raw, Function, "functions")
    if not functions:
        return "", set()
    whole: list[Raw] = msgspec.json.decode(text, type=list[Raw])
    tools = [{"type": "function", "function": each} for each in whole]
    array = check_chars(msgspec.json.encode(tools).decode(), "functions")
    return array, {function.name for function in functions}
