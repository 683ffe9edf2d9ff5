"""Chats of a gateway that neither calls tools nor tells reasoning from content."""

from typing import Any

import pytest

from shared.errors import InvalidRequest
from tests.services.gateway.asking import chat, tool

NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [tool()]),
        ("functions", [{"name": "weather"}]),
        ("tool_choice", "required"),
        ("tool_choice", NAMED),
        ("function_call", {"name": "weather"}),
        ("include_reasoning", False),
        ("separate_reasoning", True),
    ],
)
def test_fields_that_need_structure_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match="not supported") as error:
        chat(**{name: value})
    assert (error.value.param, error.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [], "functions": None, "tool_choice": "auto", "parallel_tool_calls": False},
        {"include_reasoning": True, "separate_reasoning": False},
    ],
)
def test_a_model_with_parsers_answers_with_content(fields: dict[str, Any]) -> None:
    job = chat(**fields)
    assert job.parsing is None
    assert job.tool_choice is None
    assert not job.text.has_marks
