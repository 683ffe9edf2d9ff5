"""Tools and the choice among them, as received by the tokenizer."""

import json
from typing import Any

import pytest

from services.gateway.chat.requests.parse import parse_chat
from services.gateway.mesh.job import Job
from shared.errors import InvalidRequest
from shared.wire.messages import MAX_TOOLS, ToolChoice
from tests.services.gateway.asking import CALLER, check_refusals, tool
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.text.asking import STRUCTURED, chat

TOOLS = [tool("a", parameters={"type": "object"}, strict=True), tool("b", description="ü")]
NAMED = {"type": "function", "function": {"name": "b"}}
FUNCTIONS = [each["function"] for each in TOOLS]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_each_choice_reaches_the_tokenizer(subtests: pytest.Subtests) -> None:
    fields: Any
    for fields, expected in [
        ({}, ToolChoice("auto")),
        ({"tool_choice": None, "parallel_tool_calls": None}, ToolChoice("auto")),
        ({"tool_choice": "none"}, ToolChoice("none")),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, ToolChoice("auto")),
        ({"parallel_tool_calls": False}, ToolChoice("auto", is_parallel=False)),
        ({"tool_choice": "required"}, ToolChoice("required")),
        ({"tool_choice": NAMED}, ToolChoice("required", ["b"], is_parallel=False)),
        ({"tool_choice": allowed("auto", "b")}, ToolChoice("auto", ["b"])),
        ({"tool_choice": allowed("required", "b", "a")}, ToolChoice("required", ["b", "a"])),
    ]:
        with subtests.test(fields=fields):
            job = chat(tools=TOOLS, **fields)
            assert job.tool_choice == expected
            assert json.loads(options(job).tools) == TOOLS
            assert parsing(job).is_named == (fields.get("tool_choice") is NAMED)


def options(job: Job) -> Any:
    assert job.chat is not None
    return job.chat


def parsing(job: Job) -> Any:
    assert job.parsing is not None
    return job.parsing


def test_openais_older_fields_are_tools_that_are_called_one_at_a_time(
    subtests: pytest.Subtests,
) -> None:
    kind: Any
    for asked, kind, names in [
        (None, "auto", []),
        ("auto", "auto", []),
        ("none", "none", []),
        ({"name": "b"}, "required", ["b"]),
    ]:
        with subtests.test(asked=asked):
            job = chat(functions=FUNCTIONS, function_call=asked)
            assert job.tool_choice == ToolChoice(kind, names, is_parallel=False)
            assert json.loads(options(job).tools) == TOOLS
            assert parsing(job).is_legacy
            assert parsing(job).is_named == (kind == "required")


def test_calls_are_looked_for_where_there_may_be_some(subtests: pytest.Subtests) -> None:
    fields: Any
    for fields, parsers in [
        ({}, ("", "qwen3")),
        ({"tools": TOOLS}, ("hermes", "qwen3")),
        ({"tools": TOOLS, "tool_choice": "none"}, ("", "qwen3")),
        ({"tools": TOOLS, "separate_reasoning": False}, ("hermes", "qwen3")),
    ]:
        with subtests.test(fields=fields):
            job = chat(**fields)
            assert (parsing(job).tool_parser, parsing(job).reasoning_parser) == parsers
            assert job.text.has_marks


def test_where_nothing_is_looked_for_there_are_no_marks() -> None:
    for job in (chat(separate_reasoning=False), chat(MODEL), chat(MODEL, include_reasoning=False)):
        assert job.parsing is None
        assert not job.text.has_marks


def test_without_tools_the_fields_beside_them_change_nothing() -> None:
    for fields in (
        {"tools": [], "tool_choice": "auto"},
        {"tools": None, "tool_choice": "none", "parallel_tool_calls": False},
        {"functions": [], "function_call": "none"},
    ):
        job = chat(MODEL, **fields)
        assert (job.tool_choice, options(job).tools) == (None, "")


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": {}}, "tools", "expected array"),
    ({"tools": [3]}, "tools[0]", "expected object"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", '"custom"'),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ({"tools": [tool("")]}, "tools[0].function.name", "regex"),
    ({"tools": [tool("a b")]}, "tools[0].function.name", '"a b"'),
    ({"tools": [tool("x" * 129)]}, "tools[0].function.name", "{1,128}"),
    ({"tools": [tool("a", parameters=3)]}, "tools[0].function.parameters", "expected object"),
    ({"tools": [tool("a", strict="yes")]}, "tools[0].function.strict", "expected bool"),
    ({"tools": [tool()] * (MAX_TOOLS + 1)}, "tools", f"513 items; the limit is {MAX_TOOLS}"),
    ({"tools": [tool("a", x="x" * (256 << 10))]}, "tools", "bytes; the limit is 262144"),
    ({"tool_choice": "required"}, "tool_choice", "with tools only"),
    ({"tool_choice": NAMED, "tools": []}, "tool_choice", "with tools only"),
    ({"tool_choice": "any", "tools": TOOLS}, "tool_choice", '"any"'),
    ({"tool_choice": {"type": "custom"}, "tools": TOOLS}, "tool_choice.type", '"custom"'),
    ({"tool_choice": NAMED, "tools": TOOLS[:1]}, "tool_choice.function.name",
     '"b"; no tool has this name'),
    ({"tool_choice": allowed("auto", "b", "c"), "tools": TOOLS},
     "tool_choice.allowed_tools.tools[1].function.name", '"c"'),
    ({"tool_choice": allowed("auto"), "tools": TOOLS}, "tool_choice.allowed_tools.tools", ">= 1"),
    ({"tool_choice": allowed("none", "a"), "tools": TOOLS}, "tool_choice.allowed_tools.mode",
     '"none"'),
    ({"functions": FUNCTIONS, "tools": TOOLS}, "functions", "both"),
    ({"functions": FUNCTIONS, "tool_choice": "required"}, "tool_choice", "function_call"),
    ({"function_call": {"name": "a"}, "tools": TOOLS}, "function_call", "with functions only"),
    ({"function_call": {"name": "c"}, "functions": FUNCTIONS}, "function_call.name", '"c"'),
]  # fmt: skip


def test_wrong_fields_are_refused_by_name(subtests: pytest.Subtests) -> None:
    check_refusals(WRONG, subtests, chat)


def test_a_model_without_a_tool_parser_takes_tools_only_for_its_prompt() -> None:
    assert options(chat(MODEL, tools=TOOLS, tool_choice="none")).tools
    for fields in ({"tools": TOOLS}, {"functions": FUNCTIONS}):
        with pytest.raises(InvalidRequest, match="no tool-call-parser"):
            chat(MODEL, **fields)


def test_tools_travel_as_they_came() -> None:
    odd = '[ {"type":"function", "function":{"name":"a","x":1e5,"y":123456789012345678901}} ]'
    body = b'{"messages":[{"role":"user","content":"a"}],"tools":%b}' % odd.encode()
    assert options(parse_chat(body, CALLER, STRUCTURED)).tools == odd
