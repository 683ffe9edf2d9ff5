"""Requests for messages with given fields, as Jobs and as chats."""

import json
from typing import Any

from services.gateway.apis.messages.requests.parse import ParsedMessages, parse_messages
from services.gateway.chat.requests.parse import Limits
from shared.wire.messages import ModelInfo
from tests.services.gateway.asking import CALLER
from tests.services.gateway.fakes import LIMITS

HELLO: dict[str, Any] = {"role": "user", "content": "Hi"}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Says how the weather is.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def parsed(served: ModelInfo = CALLER, limits: Limits = LIMITS, /, **fields: Any) -> ParsedMessages:
    body = {"model": "fish", "max_tokens": 16, "messages": [HELLO]} | fields
    return parse_messages(json.dumps(body).encode(), served, limits)


def chat_of(*turns: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """The messages sent to the tokenizer."""
    job = parsed(messages=list(turns) or [HELLO], **fields).job
    chat: list[dict[str, Any]] = json.loads(job.prompts[0].data.tobytes())
    return chat


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | more


def use(call_id: str = "t1", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "weather", "input": arguments}


def result(content: Any = "Sunny.", call_id: str = "t1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content} | more
