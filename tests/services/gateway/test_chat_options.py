"""Reasoning, the chat template and the messages: the parts of a chat sent to the tokenizer."""

import json
from typing import Any

import pytest

from shared.errors import InvalidRequest
from shared.wire.messages import ChatOptions
from tests.services.gateway.asking import MESSAGES, chat, check_refusals, completion
from tests.services.gateway.fakes import MODEL

THINKS = {"enable_thinking": True, "thinking": True}
DOES_NOT = {"enable_thinking": False, "thinking": False}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_template_options_are_as_the_client_asks(subtests: pytest.Subtests) -> None:
    documents = [{"title": "t", "text": "x"}]
    fields: Any
    for fields, expected in [
        ({}, ChatOptions()),
        ({"documents": [], "chat_template_kwargs": {}, "chat_template": None}, ChatOptions()),
        ({"add_generation_prompt": True}, ChatOptions()),
        ({"add_generation_prompt": False}, ChatOptions(adds_generation_prompt=False)),
        (
            {"continue_final_message": True},
            ChatOptions(adds_generation_prompt=False, continues_final_message=True),
        ),
        ({"chat_template": "{{ x }}"}, ChatOptions(template="{{ x }}")),
        ({"documents": documents}, ChatOptions(documents=json.dumps(documents))),
        ({"chat_template_kwargs": {"x": [1]}}, ChatOptions(template_kwargs='{"x":[1]}')),
    ]:
        with subtests.test(fields=fields):
            assert chat(**fields).chat == expected


def test_effort_becomes_variables_of_the_template_and_the_clients_own_come_first(
    subtests: pytest.Subtests,
) -> None:
    fields: Any
    for fields, expected in [
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none"} | DOES_NOT),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"} | THINKS),
        ({"reasoning_effort": "max"}, {"reasoning_effort": "max"} | THINKS),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "high", "enable_thinking": False, "thinking": True},
        ),
    ]:
        with subtests.test(fields=fields):
            options = chat(**fields).chat
            assert options is not None
            assert json.loads(options.template_kwargs) == expected


def test_a_budget_of_reasoning_reaches_the_tokenizer(subtests: pytest.Subtests) -> None:
    fields: Any
    for fields, expected in [
        ({}, None),
        ({"thinking_token_budget": 0}, 0),
        ({"thinking_token_budget": 9}, 9),
        ({"thinking_token_budget": -1}, None),
        ({"custom_params": {"thinking_budget": 9}}, 9),
        ({"custom_params": {}}, None),
        ({"reasoning_max_tokens": 9}, 9),
    ]:
        with subtests.test(fields=fields):
            assert chat(**fields).reasoning_budget == expected
            assert completion(**fields).reasoning_budget == expected
    assert chat(thinking_token_budget=0, reasoning_effort="none").reasoning_budget == 0


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"reasoning_effort": "huge"}, "reasoning_effort", '"huge"'),
    ({"thinking_token_budget": -2}, "thinking_token_budget", ">= -1"),
    ({"thinking_token_budget": 5, "reasoning_effort": "none"}, "thinking_token_budget",
     'reasoning_effort is "none"'),
    ({"thinking_token_budget": 5, "custom_params": {"thinking_budget": 5}}, "thinking_token_budget",
     "both"),
    ({"reasoning_max_tokens": 5, "custom_params": {"thinking_budget": 5}}, "reasoning_max_tokens",
     "both"),
    ({"custom_params": {"x": 5}}, "custom_params.x", "not a field"),
    ({"documents": [1]}, "documents[0]", "expected object"),
    ({"documents": "a"}, "documents", "expected array"),
    ({"chat_template": ""}, "chat_template", ">= 1"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "expected object"),
    ({"chat_template_kwargs": {"x": "x" * (256 << 10)}}, "chat_template_kwargs", "the limit is"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream true only"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation", "no field is added"),
    ({"messages": [{"role": "cat", "content": "a"}]}, "messages[0].role", "one of system, dev"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
     "messages[0].tool_calls[0].function", "required"),
    ({"messages": [{"role": "assistant", "content": "", "reasoning": 3}]}, "messages[0].reasoning",
     "expected str"),
]  # fmt: skip


def test_wrong_fields_are_refused_by_name(subtests: pytest.Subtests) -> None:
    check_refusals(WRONG, subtests)


def test_an_error_of_the_mesh_names_the_clients_field() -> None:
    assert chat(custom_params={"thinking_budget": 1}).field_names == {
        "prompt": "messages",
        "reasoning_budget": "custom_params.thinking_budget",
    }
    assert completion(thinking_token_budget=1).field_names == {
        "reasoning_budget": "thinking_token_budget"
    }


def test_a_budget_needs_a_model_that_reasons() -> None:
    for ask in (chat, completion):
        with pytest.raises(InvalidRequest, match="no reasoning-parser"):
            ask(MODEL, thinking_token_budget=5)


def test_messages_travel_as_they_came() -> None:
    messages = [
        {"role": "developer", "content": "d", "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "assistant", "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "c"}]},
        {"role": "function", "name": "f", "content": "c"},
    ]
    [prompt] = chat(messages=messages).prompts
    assert json.loads(prompt.data.tobytes()) == messages


def test_an_echoed_chat_begins_with_the_text_that_the_assistant_has_begun() -> None:
    begun = {"role": "assistant", "content": [{"type": "text", "text": "On"}] * 2}
    assert chat(messages=[*MESSAGES, begun], echo=True).first_text == "OnOn"
    assert chat(messages=[*MESSAGES, begun]).first_text == ""
    assert chat(echo=True).first_text == ""


def test_a_stream_repeats_its_usage_beside_the_usage_at_its_end() -> None:
    for options, expected in [
        ({"include_usage": True, "continuous_usage_stats": True}, True),
        ({"include_usage": True, "continuous_usage_stats": False}, False),
        ({"continuous_usage_stats": True, "include_obfuscation": False}, False),
    ]:
        assert completion(stream=True, stream_options=options).repeats_usage == expected


def test_the_size_of_options_beside_the_prompts_is_counted() -> None:
    fields: dict[str, Any] = {"documents": [{"a": "ä"}], "chat_template": "x" * 1000}
    job = chat(**fields, chat_template_kwargs={"k": "v"}, guided_regex="a" * 500)
    texts = ('[{"a": "\\u00e4"}]', '{"k":"v"}')
    assert job.option_bytes == sum(map(len, texts)) + 1500
    assert chat().option_bytes == completion().option_bytes == 0
