"""A request's options for the chat template, apart from the messages."""

from typing import Any

import msgspec
from msgspec import Raw

from services.gateway.chat.requests.history import NO_LIMIT
from services.gateway.chat.requests.json_body import json_errors
from services.gateway.chat.requests.raw_json import NULL, check_chars, json_text
from services.gateway.chat.requests.schema import ChatRequest, TokenizeRequest
from services.gateway.http.violations import violation
from shared.wire.messages import ChatOptions


def chat_options(
    request: ChatRequest | TokenizeRequest,
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
