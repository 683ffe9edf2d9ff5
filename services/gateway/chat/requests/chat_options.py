"""A request's options for the chat template, apart from the messages."""

from typing import Any

import msgspec
from msgspec import Raw

from services.gateway.chat.requests.json_body import json_errors
from services.gateway.chat.requests.raw_json import NULL, check_chars, json_text
from services.gateway.chat.requests.schema import ChatRequest
from services.gateway.chat.requests.tool_schema import FunctionTool
from services.gateway.http.violations import violation
from shared.errors import InvalidRequest
from shared.wire.messages import MAX_TOOLS, ChatOptions, ModelInfo

NO_LIMIT, ALL_THAT_FIT = 0, -1
TEXT_SHARE = 4  # this part of the context is left to texts without max_tokens


def history_limit(asked: int, max_tokens: int | None, model: ModelInfo) -> int:
    """``asked`` tokens, reduced to leave room for a text of ``max_tokens``; 0: no limit, also if
    there is no room for any prompt."""
    context = model.max_model_len
    if asked == ALL_THAT_FIT:
        return max(context - (max_tokens or context // TEXT_SHARE), 0)
    return min(asked, max(context - (max_tokens or 1), 0))


def requested_limit(
    request: ChatRequest, default: int, max_tokens: int | None, model: ModelInfo
) -> int:
    """``default`` applies to requests without a choice. Raises InvalidRequest for a request to cut
    tokens and drop turns at once."""
    if request.truncate_prompt_tokens is None:
        asked = default if request.history_limit is None else request.history_limit
        return history_limit(asked, max_tokens, model)
    if request.history_limit:
        raise InvalidRequest(
            "history_limit is allowed without truncate_prompt_tokens only",
            param="history_limit",
        )
    return NO_LIMIT


def chat_options(
    request: ChatRequest,
    tools: str,
    more_kwargs: dict[str, Any] | None = None,
    history_limit: int = NO_LIMIT,
) -> ChatOptions:
    """``more_kwargs`` follow from other fields; the client's own variables come before them.
    Raises InvalidRequest."""
    continues = bool(request.continue_final_message)
    adds = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    return ChatOptions(
        tools=tools,
        documents="" if request.documents == NULL else _documents(request.documents),
        template_kwargs=_kwargs(request.chat_template_kwargs, more_kwargs),
        template=request.chat_template or "",
        adds_generation_prompt=adds,
        continues_final_message=continues,
        history_limit=history_limit,
    )


@json_errors()
def _documents(raw: Raw) -> str:
    text = json_text(raw, "documents")
    try:
        documents = msgspec.json.decode(text, type=list[dict[str, Any]])
    except msgspec.ValidationError as error:
        raise violation(error, "documents", msgspec.json.decode(text)) from None
    return text if documents else ""


def _kwargs(raw: Raw, more: dict[str, Any] | None) -> str:
    if raw == NULL and not more:
        return ""
    param = "chat_template_kwargs"
    kwargs = {**(more or {}), **(_own_kwargs(raw, param) if raw != NULL else {})}
    return check_chars(msgspec.json.encode(kwargs).decode(), param) if kwargs else ""


@json_errors()
def _own_kwargs(raw: Raw, param: str) -> dict[str, Raw]:
    text = json_text(raw, param)
    try:
        return msgspec.json.decode(text, type=dict[str, Raw])
    except msgspec.ValidationError as error:
        raise violation(error, param, msgspec.json.decode(text)) from None


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
