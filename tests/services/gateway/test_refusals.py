"""What the parser refuses, and what it tells the client."""

import json
from typing import Any

import pytest

from services.gateway.parse import parse_chat, parse_completion
from shared.errors import InvalidRequest
from tests.services.gateway.fakes import MODEL

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


def refusal_of_chat(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        parse_chat(json.dumps({"messages": MESSAGES} | fields).encode(), MODEL)
    return error.value


def refusal_of_completion(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        parse_completion(json.dumps(fields).encode(), MODEL)
    return error.value


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"a":"\xff"}', b"[" * 100_000, b"[]", b"3"])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="body"):
        parse_chat(body, MODEL)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 2.5}, "temperature", ["2.5", "<= 2"]),
        ({"temperature": "hot"}, "temperature", ['"hot"', "float"]),
        ({"top_p": 0}, "top_p", ["0", "> 0"]),
        ({"top_k": -2}, "top_k", ["-2", ">= -1"]),
        ({"seed": 2**63}, "seed", [str(2**63), str(2**63 - 1)]),
        ({"max_tokens": 0}, "max_tokens", ["0", ">= 1"]),
        ({"max_tokens": 1.5}, "max_tokens", ["1.5", "int"]),
        ({"max_completion_tokens": True}, "max_completion_tokens", ["true", "int"]),
        ({"stop": ""}, "stop", ['""', ">= 1"]),
        ({"stop": ["a", ""]}, "stop[1]", ['""', ">= 1"]),
        ({"stop": ["a"] * 17}, "stop", ["17", "<= 16"]),
        ({"stop": "x" * 1001}, "stop", ["xxx…", "<= 1000"]),
        ({"stream_options": {"include_usage": True}}, "stream_options", ["stream"]),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", ["not a field"]),
        ({"messages": None}, "messages", ["null", "array"]),
        ({"messages": []}, "messages", ["[]", ">= 1"]),
        ({"messages": [3]}, "messages[0]", ["3", "object"]),
        ({"messages": [{"content": "a"}]}, "messages[0].role", ["required"]),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", ["3", "str"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            ["image_url", "text"],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            ["required"],
        ),
    ],
)
def test_a_wrong_value_is_refused_with_field_value_and_limit(
    fields: dict[str, Any], param: str, words: list[str]
) -> None:
    error = refusal_of_chat(**fields)
    assert error.param == param
    assert all(word in error.message for word in [param, *words])
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([-1], "prompt[0]"),
        ([1, "a"], "prompt[1]"),
        ([1, MODEL.vocab_size], "prompt[1]"),
        ([1, 2**40], "prompt[1]"),
        ([True], "prompt[0]"),
        ({}, "prompt"),
    ],
)
def test_a_wrong_prompt_is_refused(prompt: object, param: str) -> None:
    assert refusal_of_completion(prompt=prompt).param == param


def test_a_missing_prompt_is_required() -> None:
    assert refusal_of_completion().message == "prompt is required"


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]]])
def test_a_list_of_prompts_is_not_supported_yet(prompt: object) -> None:
    assert refusal_of_completion(prompt=prompt).code == "unsupported_parameter"
