"""Requests with given fields, as Jobs."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest

from services.gateway.chat.requests.parse import Limits, parse_chat, parse_completion
from services.gateway.mesh.job import Job
from shared.errors import InvalidRequest
from shared.wire.messages import ModelInfo
from tests.services.gateway.fakes import LIMITS, MODEL

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
CALLER = msgspec.structs.replace(MODEL, tool_parser="hermes", reasoning_parser="qwen3")
"""A model with tool calls and reasoning."""


def chat(model: ModelInfo = CALLER, limits: Limits = LIMITS, /, **fields: Any) -> Job:
    return parse_chat(json.dumps({"messages": MESSAGES} | fields).encode(), model, limits)


def completion(model: ModelInfo = CALLER, limits: Limits = LIMITS, /, **fields: Any) -> Job:
    return parse_completion(json.dumps({"prompt": "a"} | fields).encode(), model, limits)


def check_refusals(
    wrong: Iterable[tuple[dict[str, Any], str, str]],
    subtests: pytest.Subtests,
    ask: Callable[..., Job] = chat,
) -> None:
    """Each of ``wrong``: fields of a chat, the field named in its error, and words of the error."""
    for fields, param, words in wrong:
        with subtests.test(fields=str(fields)[:80]), pytest.raises(InvalidRequest) as error:
            ask(**fields)
        assert error.value.param == param
        assert words in error.value.message


def tool(name: str = "weather", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | more}
