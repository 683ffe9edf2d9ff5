"""Tools of Anthropic's shape as tools of a chat."""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw

from services.gateway.apis.messages.requests.schema import (
    AnyChoice,
    AutoChoice,
    CacheControl,
    NoChoice,
    PromptRequest,
    Tool,
    ToolChoice,
)
from services.gateway.chat.requests.json_body import json_errors
from services.gateway.chat.requests.raw_json import NULL, json_text
from services.gateway.chat.requests.tool_schema import FunctionName, NamedTool, ToolChoiceField
from services.gateway.chat.requests.unsupported import unsupported
from services.gateway.http.violations import show, violation
from shared.errors import InvalidRequest

CLIENTS_OWN = (None, "custom")
DIRECT = "direct"


@json_errors()
def chat_tools(raw: Raw, mark: Callable[[CacheControl | None], None]) -> list[dict[str, Any]]:
    """Calls ``mark`` with the mark of each. Raises InvalidRequest."""
    if raw == NULL:
        return []
    tools = msgspec.json.decode(json_text(raw, "tools"))
    if not isinstance(tools, list):
        raise InvalidRequest(f"tools is {show(tools)}; expected array", param="tools")
    found = [_tool(fields, f"tools[{index}]") for index, fields in enumerate(tools)]
    for tool in found:
        mark(tool.cache_control)
    return [_chat_tool(tool) for tool in found]


def chat_choice(request: PromptRequest, names: set[str]) -> ToolChoiceField | None:
    """Raises InvalidRequest."""
    match request.tool_choice:
        case None:
            return None
        case AutoChoice():
            return "auto"
        case AnyChoice():
            if not names:
                param = "tool_choice.type"
                raise InvalidRequest(
                    f'{param} is "any"; it is allowed with tools only', param=param
                )
            return "required"
        case NoChoice():
            return "none"
        case ToolChoice(name):
            if name not in names:
                raise InvalidRequest(
                    f"tool_choice.name is {show(name)}; no tool has this name",
                    param="tool_choice.name",
                )
            return NamedTool(FunctionName(name))


def is_parallel(request: PromptRequest) -> bool:
    match request.tool_choice:
        case AutoChoice(disabled) | AnyChoice(disabled) | ToolChoice(_, disabled):
            return not disabled
        case _:
            return True


def _tool(fields: Any, param: str) -> Tool:
    if isinstance(fields, dict):
        _refuse_foreign(fields, param)
    try:
        return msgspec.convert(fields, Tool)
    except msgspec.ValidationError as error:
        raise violation(error, param, fields, Tool) from None


def _chat_tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _refuse_foreign(fields: dict[str, Any], param: str) -> None:
    """Refuses tools run by Anthropic's servers, tools with a schema that only Anthropic's models
    know, and tools called by the model's own code."""
    kind, callers = fields.get("type"), fields.get("allowed_callers") or [DIRECT]
    if kind not in CLIENTS_OWN:
        raise unsupported(f"{param}.type", kind, 'null or "custom"')
    if callers != [DIRECT]:
        raise unsupported(f"{param}.allowed_callers", callers, 'null or ["direct"]')
