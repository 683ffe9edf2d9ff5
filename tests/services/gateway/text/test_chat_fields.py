"""Reasoning and tools among the other fields of a chat."""

import json

from tests.services.gateway.asking import tool
from tests.services.gateway.text.asking import chat


def test_reasoning_is_shown_unless_the_client_does_not_want_it() -> None:
    for asked, expected in [(None, True), (True, True), (False, False)]:
        parsing = chat(include_reasoning=asked).parsing
        assert parsing is not None
        assert parsing.shows_reasoning == expected


def test_an_error_of_the_mesh_names_the_clients_field() -> None:
    asked = chat(functions=[{"name": "f"}], custom_params={"thinking_budget": 1})
    assert asked.field_names == {
        "prompt": "messages",
        "tools": "functions",
        "tool_choice": "function_call",
        "reasoning_budget": "custom_params.thinking_budget",
    }


def test_the_tools_that_a_request_holds_are_counted() -> None:
    tools = [tool("f")]
    assert chat(tools=tools).option_bytes == len(json.dumps(tools))
