"""Bad requests for messages: each error names the field's path, its value and the allowed
values."""

from http import HTTPStatus
from typing import Any

import pytest

from services.gateway.apis.messages.replies.errors import anthropic_error, anthropic_status
from shared.errors import (
    BodyTooLarge,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestError,
    Unauthorized,
    Unavailable,
)
from tests.services.gateway.apis.messages.asking import (
    HELLO,
    WEATHER,
    assistant,
    parsed,
    result,
    text,
    use,
    user,
)

IMAGE = {"type": "image", "source": {"type": "url", "url": "https://fish.example/1.png"}}
THOUGHT = {"type": "thinking", "thinking": "Hm", "signature": "x"}
SERVER_TOOL = {"type": "web_search_20250305", "name": "web_search"}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is null; expected int"),
    ({"max_tokens": -1}, "max_tokens is -1; expected int >= 0"),
    ({"messages": "Hi"}, 'messages is "Hi"; expected array, got str'),
    ({"messages": []}, "messages is []; expected array of length >= 1"),
    ({"messages": ["Hi"]}, 'messages.0 is "Hi"; expected object, got str'),
    ({"messages": [{"role": "user"}]}, "messages.0.content is required"),
    ({"messages": [{"role": "tool", "content": ""}]}, 'messages.0.role is "tool"; expected one of'),
    ({"messages": [user()]}, "messages.0.content is []; expected array of length >= 1"),
    ({"messages": [HELLO, user(IMAGE)]}, 'messages.1.content.0.type is "image", which is not sup'),
    ({"messages": [HELLO, user({"type": "document"})]}, "messages.1.content.0.type is "),
    ({"messages": [user({"type": "fish"})]}, 'messages.0.content.0.type is "fish"; expected one'),
    ({"messages": [user({"type": ["text"]})]}, "messages.0.content.0.type is a list of 1; "),
    ({"messages": [user({"text": "a"})]}, "messages.0.content.0.type is required"),
    ({"messages": [user("a")]}, 'messages.0.content.0 is "a"; expected object'),
    ({"messages": [user(text(1))]}, "messages.0.content.0.text is 1; expected str"),  # type: ignore[arg-type]
    ({"messages": [user(use())]}, 'messages.0.content.0.type is "tool_use"; expected text, tool_'),
    ({"messages": [HELLO, assistant(result())]}, 'messages.1.content.0.type is "tool_result"; '),
    ({"messages": [user(result())]}, 'messages.0.content.0.tool_use_id is "t1"; no tool'),
    ({"messages": [HELLO, assistant(use()), user(text("a"), result())]},
     "messages.2.content.1 is a tool_result behind text"),
    ({"messages": [HELLO, assistant(use()), user(result([text("a"), IMAGE]))]},
     'messages.2.content.0.content.1.type is "image", which is not supported'),
    ({"messages": [HELLO, assistant(use())]}, "messages.1.content is to be continued"),
    ({"messages": [HELLO, assistant(THOUGHT)]}, "messages.1.content is to be continued"),
    ({"messages": [HELLO, assistant(use() | {"input": "a"}), HELLO]},
     'messages.1.content.0.input is "a"; expected object'),
    ({"system": 1}, "system is 1; expected str or array"),
    ({"system": [IMAGE]}, 'system.0.type is "image", which is not supported; allowed: text'),
    ({"tools": {}}, "tools is {}; expected array"),
    ({"tools": [WEATHER, {"name": "a"}]}, "tools.1.input_schema is required"),
    ({"tools": [WEATHER | {"name": "a b"}]}, 'tools.0.name is "a b"; expected str matching'),
    ({"tools": [SERVER_TOOL]}, 'tools.0.type is "web_search_20250305", which is not supported'),
    ({"tools": [WEATHER | {"allowed_callers": ["code_execution_20250825"]}]},
     "tools.0.allowed_callers is a list of 1, which is not supported"),
    ({"tool_choice": {"type": "any"}}, 'tool_choice.type is "any"; it is allowed with tools only'),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "time"}},
     'tool_choice.name is "time"; no tool has this name'),
    ({"tools": [WEATHER], "tool_choice": {"type": "required"}},
     'tool_choice.type is "required"; expected one of '),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}},
     "thinking.budget_tokens is 0; expected int >= 1"),
    ({"thinking": {"type": "between_tools"}}, 'thinking.type is "between_tools"; expected one of'),
    ({"temperature": 1.5}, "temperature is 1.5; expected float <= 1"),
    ({"stop_sequences": [""]}, 'stop_sequences.0 is ""; expected str of length >= 1'),
    ({"output_config": {"effort": "huge"}}, 'output_config.effort is "huge"; '),
    ({"output_config": {"task_budget": {}}}, "output_config.task_budget is not a field"),
    ({"output_config": {"format": {"type": "json_schema", "schema": 1}}},
     "output_config.format.schema is 1; expected object"),
    ({"container": "c1"}, 'container is "c1", which is not supported'),
    ({"mcp_servers": [{}]}, "mcp_servers is a list of 1, which is not supported"),
    ({"speed": "fast"}, 'speed is "fast", which is not supported'),
    ({"service_tier": "gold"}, 'service_tier is "gold"; '),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}},
     'context_management.edits.0.type is "compact_20260112"; '),
    ({"model": "whale"}, 'model is "whale"; served here: fish'),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), WRONG)
def test_an_error_names_the_field_by_its_path(fields: dict[str, Any], words: str):
    with pytest.raises(RequestError) as raised:
        parsed(**fields)
    assert raised.value.status in (400, 404)
    reply = anthropic_error(raised.value, "r1")
    assert reply.error.message.startswith(words)
    assert "[" not in reply.error.message.partition(";")[0] or "is []" in reply.error.message


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("a"), 400, "invalid_request_error"),
        (Unauthorized("a"), 401, "authentication_error"),
        (NotFound("a"), 404, "not_found_error"),
        (BodyTooLarge("a"), 413, "request_too_large"),
        (Overloaded("a"), 429, "rate_limit_error"),
        (InternalError("a"), 500, "api_error"),
        (Unavailable("a"), 529, "overloaded_error"),
    ],
)
def test_each_status_has_its_type(error: RequestError, status: int, kind: str):
    assert anthropic_status(error) == status
    reply = anthropic_error(error, "r1")
    assert (reply.error.type, reply.error.message, reply.request_id) == (kind, "a", "r1")


def test_a_method_that_is_not_allowed_is_the_clients_fault():
    error = RequestError("a", code="method_not_allowed")
    error.status = HTTPStatus.METHOD_NOT_ALLOWED
    assert anthropic_error(error, "r1").error.type == "invalid_request_error"


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for():
    error = InvalidRequest("the prompt has 9", param="prompt", code="context_length_exceeded")
    assert anthropic_error(error, "r1").error.message == "prompt is too long: the prompt has 9"


def test_errors_in_a_tool_use_the_clients_names():
    param = "tools[2].function.parameters.properties.a"
    error = InvalidRequest(f"{param}: not is not supported", param=param)
    message = anthropic_error(error, "r1").error.message
    assert message == "tools.2.input_schema.properties.a: not is not supported"
