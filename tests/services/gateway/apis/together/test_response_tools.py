"""Tools of /v1/responses, as those of a chat."""

import json
from typing import Any

import pytest

from services.gateway.http.violations import client_names
from services.gateway.mesh.job import Job
from shared.errors import InvalidRequest
from shared.wire.messages import ModelInfo, ToolChoice
from tests.services.gateway.apis.responses import test_fields as fields_of
from tests.services.gateway.apis.responses.test_fields import RUN, TOOLS, WEATHER
from tests.services.gateway.asking import CALLER
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.text.asking import STRUCTURED


def ask(served: ModelInfo = CALLER, /, **fields: Any) -> Job:
    return fields_of.ask(served, STRUCTURED, **fields)


def test_tools_match_a_chat() -> None:
    pattern = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    chat = ask(tools=[WEATHER, RUN | {"format": pattern}, RUN | {"name": "patch", "format": lark}])
    assert chat.chat
    weather, run, patch = (tool["function"] for tool in json.loads(chat.chat.tools))
    assert weather == {"name": "weather", "parameters": {"type": "object"}}
    assert run["strict"]
    assert run["parameters"]["properties"]["input"]["pattern"] == "^(?:a+)$"
    assert 'start: "a"' in patch["description"]
    assert not patch["strict"]
    assert chat.warnings == ("tools[2].format: the model sees the grammar and is not held to it",)


def test_a_choice_of_tools_is_that_of_a_chat(subtests: pytest.Subtests) -> None:
    asked: Any
    for asked, expected in [
        (None, ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        (
            {"type": "function", "name": "weather"},
            ToolChoice("required", ["weather"], is_parallel=False),
        ),
        ({"type": "custom", "name": "run"}, ToolChoice("required", ["run"], is_parallel=False)),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "run"}]},
            ToolChoice("auto", ["run"]),
        ),
    ]:
        with subtests.test(asked=asked):
            assert ask(tools=TOOLS, tool_choice=asked).tool_choice == expected
    assert not ask(tools=TOOLS, parallel_tool_calls=False).tool_choice.is_parallel


def test_tools_need_a_model_that_calls_them() -> None:
    with pytest.raises(InvalidRequest, match="tool-call-parser"):
        ask(MODEL, tools=TOOLS)


def test_a_choice_needs_tools() -> None:
    with pytest.raises(InvalidRequest, match="with tools only") as error:
        ask(tool_choice="required")
    assert error.value.param == "tool_choice"


def test_an_error_of_the_mesh_names_the_field_as_it_is_here() -> None:
    names = ask(tools=[WEATHER, {"type": "namespace", "name": "n", "tools": [WEATHER]}]).field_names
    for param, expected in [
        ("messages", "input"),
        ("max_tokens", "max_output_tokens"),
        ("tools[0].function.parameters.type", "tools[0].parameters.type"),
        ("tools[1].function.parameters", "tools[1].tools[0].parameters"),
        ("text.format.schema.type", "text.format.schema.type"),
    ]:
        with pytest.raises(InvalidRequest) as error, client_names(names):
            raise InvalidRequest(f"{param} is wrong", param=param)
        assert error.value.param == expected
        assert error.value.message == f"{expected} is wrong"
