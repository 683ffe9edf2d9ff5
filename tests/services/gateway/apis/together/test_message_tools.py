"""Tools of /v1/messages, as those of a chat."""

import json
from typing import Any

import pytest

from shared.wire.messages import ToolChoice
from tests.services.gateway.apis.messages import asking
from tests.services.gateway.apis.messages.asking import WEATHER
from tests.services.gateway.apis.messages.test_conversions import marked
from tests.services.gateway.asking import CALLER
from tests.services.gateway.text.asking import STRUCTURED


def parsed(**fields: Any) -> asking.ParsedMessages:
    return asking.parsed(CALLER, STRUCTURED, **fields)


def test_tools_are_functions_of_a_chat():
    tools = [
        WEATHER | {"type": "custom", "strict": True, "eager_input_streaming": True} | marked("1h"),
        {"name": "clock", "input_schema": {}, "allowed_callers": ["direct"]},
    ]
    job = parsed(tools=tools).job
    assert json.loads(job.chat.tools) == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": WEATHER["description"],
                "parameters": WEATHER["input_schema"],
                "strict": True,
            },
        },
        {"type": "function", "function": {"name": "clock", "parameters": {}}},
    ]
    assert job.parsing.tool_parser == "hermes"


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice("auto")),
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto", [], False)),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required", [], False)),
        ({"type": "tool", "name": "weather"}, ToolChoice("required", ["weather"], False)),
        ({"type": "none"}, ToolChoice("none")),
    ],
)
def test_which_tools_may_be_called(given: Any, choice: ToolChoice):
    assert parsed(tools=[WEATHER], tool_choice=given).job.tool_choice == choice
