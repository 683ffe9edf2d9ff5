"""Fields of /v1/responses: their effects, and refusals."""

import json
from typing import Any

import msgspec
import pytest

from services.gateway.apis.responses.requests.parse import FIELD_NAMES, read_request, response_job
from services.gateway.apis.responses.requests.schema import NEUTRAL
from services.gateway.chat.requests.parse import Limits
from services.gateway.chat.requests.unsupported import WITHOUT_EFFECT
from services.gateway.mesh.job import Job
from shared.errors import InvalidRequest, NotFound
from shared.wire.messages import ModelInfo, OutputFormat
from tests.services.gateway.asking import CALLER
from tests.services.gateway.fakes import LIMITS

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
RUN = {"type": "custom", "name": "run", "description": "Runs it."}
TOOLS = [WEATHER, RUN]
IMAGE = {"type": "input_image", "image_url": "x"}
OBFUSCATED = {"include_obfuscation": True}
SCHEMA = {"type": "json_schema", "name": "fish", "schema": {"type": "object"}}


def ask(served: ModelInfo = CALLER, limits: Limits = LIMITS, /, **fields: Any) -> Job:
    request = read_request(json.dumps({"input": "Hi"} | fields).encode())
    return response_job(request, request.items, decrypted, served, limits)


def decrypted(content: str) -> str | None:
    return content.removeprefix("sealed ") if content.startswith("sealed ") else None


def messages_of(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.loads(
        ask(input=[*items], **fields).prompts[0].data.tobytes()
    )
    return messages


def message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def call(number: str, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": number, "name": "f", "arguments": "{}"} | more


def test_a_conversation_becomes_the_messages_of_a_chat() -> None:
    assert messages_of(
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        message("assistant", "Let me see."),
        call("1"),
        call("2", namespace="n"),
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {
            "type": "function_call_output",
            "call_id": "2",
            "output": [{"type": "input_text", "text": "two"}],
        },
        message("assistant", "So."),
        message("assistant", "Yes."),
        {"type": "custom_tool_call", "call_id": "3", "name": "run", "input": 'a "b"'},
        {"type": "custom_tool_call_output", "call_id": "3", "output": "ran"},
    ) == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "2", "type": "function", "function": {"name": "n__f", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "assistant", "content": "So."},
        {
            "role": "assistant",
            "content": "Yes.",
            "tool_calls": [
                {
                    "id": "3",
                    "type": "function",
                    "function": {"name": "run", "arguments": '{"input":"a \\"b\\""}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "3", "content": "ran"},
    ]


def test_a_message_may_be_empty() -> None:
    for content in ("", [], [{"type": "input_text", "text": ""}]):
        assert messages_of({"role": "user", "content": content}) == [
            {"role": "user", "content": ""}
        ]


def test_instructions_come_first_and_merge_with_following_system_messages() -> None:
    hi = {"role": "user", "content": "Hi"}
    assert messages_of(hi, instructions="Be short.") == [
        {"role": "system", "content": "Be short."},
        hi,
    ]
    developer = message("developer", "In verse.")
    assert messages_of(developer, hi, developer, instructions="Be short.") == [
        {"role": "system", "content": "Be short.\n\nIn verse."},
        hi,
        {"role": "developer", "content": "In verse."},
    ]


def test_reasoning_comes_back_from_its_cipher_or_its_text() -> None:
    text = [{"type": "reasoning_text", "text": "content"}]
    summary = [{"type": "summary_text", "text": "summary"}]
    fields: Any
    for fields, expected in [
        ({"encrypted_content": "sealed secret", "summary": summary}, "secret"),
        ({"encrypted_content": "foreign", "summary": summary}, "summary"),
        ({"content": text, "summary": summary}, "content"),
        ({"summary": summary * 2}, "summary\n\nsummary"),
    ]:
        reasoning = {"type": "reasoning", **fields}
        [reply] = messages_of(reasoning, message("assistant", "Yes."))
        assert reply == {"role": "assistant", "content": "Yes.", "reasoning_content": expected}
    [reply] = messages_of({"type": "reasoning", "summary": []}, message("assistant", "Yes."))
    assert "reasoning_content" not in reply


def test_a_text_format_is_a_response_format() -> None:
    form = ask(text={"format": SCHEMA | {"strict": True}}).format
    assert form == OutputFormat("json_schema", "text.format.schema", '{"type": "object"}', True)
    assert ask(text={"format": {"type": "json_object"}}).format.kind == "json_object"
    assert ask(text={"format": {"type": "text"}, "verbosity": "medium"}).format is None
    assert ask(structured_outputs={"choice": ["a"]}).format.kind == "choice"


def test_sampling_fields_match_a_chat() -> None:
    fields = {"top_k": 3, "seed": 5, "temperature": 0.5, "min_p": 0.1, "stop": ["x"]}
    job = ask(**fields, max_output_tokens=7, reasoning={"effort": "none"}, service_tier="auto")
    assert (job.params.top_k, job.params.seed, job.params.max_tokens) == (3, 5, 7)
    assert job.text.stop == ["x"]
    assert job.chat is not None
    assert json.loads(job.chat.template_kwargs)["enable_thinking"] is False
    job = ask(include=["message.output_text.logprobs"], top_logprobs=4)
    assert job.params.logprobs == 4
    assert ask(include=["reasoning.encrypted_content"]).params.logprobs is None


def test_refused_fields_are_named(subtests: pytest.Subtests) -> None:
    hosted = {"type": "web_search"}
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"input": ""}, "input", "length >= 1"),
        ({"input": []}, "input", "length >= 1"),
        ({"input": 3}, "input", "array"),
        ({"input": ["x"]}, "input[0]", "object"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "web_search_call"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", '"tool"'),
        ({"input": [{"role": "user"}]}, "input[0].content", "required"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type", "image"),
        ({"input": [call("1", name=None)]}, "input[0].name", "required"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "required"),
        ({"tools": [hosted]}, "tools[0].type", "web_search"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name", "a b"),
        ({"tools": [WEATHER, RUN | {"name": "weather"}]}, "tools[1].name", "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": hosted}, "tool_choice.type", "web_search"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "run"}},
            "tool_choice.name",
            "no function",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "custom", "name": "weather"}},
            "tool_choice.name",
            "no custom tool",
        ),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "grammar"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "huge"),
        ({"include": ["fish"]}, "include[0]", "fish"),
        ({"top_logprobs": 3}, "top_logprobs", "include"),
        ({"metadata": {"a": 1}}, "metadata[...]", "str"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        (
            {"stream_options": OBFUSCATED, "stream": True},
            "stream_options.include_obfuscation",
            "hide",
        ),
        ({"stream_options": {}}, "stream_options", "with stream true only"),
        (
            {"stream_options": {"include_usage": False}, "stream": True},
            "stream_options.include_usage",
            "null or true",
        ),
        (
            {"stream_options": {"continuous_usage_stats": True}, "stream": True},
            "stream_options.continuous_usage_stats",
            "null or false",
        ),
        ({"input": [{"type": "reasoning"}]}, "input", "[]"),
        ({"top_logprobs": 21}, "top_logprobs", "<= 20"),
        (
            {"reasoning": {"effort": "none"}, "thinking_token_budget": 5},
            "thinking_token_budget",
            "none",
        ),
        ({"truncation": "old"}, "truncation", "auto"),
        ({"conversation": "c"}, "conversation", "allowed: null"),
        ({"prompt": {"id": "p"}}, "prompt", "allowed: null"),
        ({"n": 2}, "n", "allowed: null or 1"),
        ({"max_tokens": 5}, "max_tokens", "allowed: null"),
        ({"response_format": {"type": "text"}}, "response_format", "allowed: null"),
    ]  # fmt: skip
    for fields, param, words in wrong:
        with subtests.test(fields=str(fields)[:80]):
            with pytest.raises(InvalidRequest) as error:
                ask(**fields)
            assert error.value.param == param
            assert words in error.value.message


def test_fields_without_effect_are_named() -> None:
    repeated = {"user": "ada", "metadata": {"a": "b"}, "prompt_cache_key": "k"}
    neutral = {"service_tier": "auto", "text": {"verbosity": "medium"}, "session_id": None}
    assert ask(**repeated, **neutral).warnings == ()
    asked = ask(service_tier="flex", session_id="s", text={"verbosity": "low"})
    names = [warning.partition(":")[0] for warning in asked.warnings]
    assert names == ["service_tier", "session_id", "text.verbosity"]


def test_a_model_needs_its_name() -> None:
    with pytest.raises(NotFound):
        ask(msgspec.structs.replace(CALLER, names=["other"]), model="fish")


def test_no_field_is_neutral_and_without_effect_and_renamed() -> None:
    assert not NEUTRAL.keys() & WITHOUT_EFFECT.keys()
    assert {"prompt", "messages", "max_tokens"} <= FIELD_NAMES.keys()
