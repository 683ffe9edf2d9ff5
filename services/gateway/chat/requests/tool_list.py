"""The tools listed in a request."""

from typing import Any

import msgspec
from msgspec import Raw

from services.gateway.chat.requests.json_body import json_errors
from services.gateway.chat.requests.raw_json import NULL, json_text
from services.gateway.chat.requests.tool_schema import FunctionTool
from services.gateway.http.violations import violation
from shared.errors import InvalidRequest
from shared.wire.messages import MAX_TOOLS


def listed_tools(raw: Raw) -> tuple[str, set[str]]:
    """The JSON array for the chat template, and the names. Raises InvalidRequest."""
    if raw == NULL:
        return "", set()
    tools, text = items_of(raw, FunctionTool, "tools")
    return text, {tool.function.name for tool in tools}


@json_errors()
def items_of(raw: Raw, kind: Any, param: str) -> tuple[list[Any], str]:
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
