"""Requests to the Messages API, as the mesh gets them."""

import json
from typing import Any

import msgspec
import pytest

from services.gateway.apis.messages.requests.signature import Signer, signed_text
from shared.errors import InvalidRequest
from tests.services.gateway.apis.messages.asking import (
    HELLO,
    WEATHER,
    assistant,
    chat_of,
    parsed,
    result,
    text,
    use,
    user,
)
from tests.services.gateway.asking import CALLER
from tests.services.gateway.fakes import MODEL

BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def thinking(words: str, holds_text: bool = False, fingerprint: str = "") -> dict[str, Any]:
    signer = Signer(fingerprint or CALLER.fingerprint, holds_text)
    signer.add(words)
    shown = "" if holds_text else words
    return {"type": "thinking", "thinking": shown, "signature": signer.signature()}


def marked(ttl: str) -> dict[str, Any]:
    return {"cache_control": {"type": "ephemeral", "ttl": ttl}}


def test_texts_are_joined_whatever_cache_marks_they_have():
    system = [text("Be kind.", **marked("1h")), text("Be brief.")]
    turn = user(text("Look:"), text("a fish", **marked("1h")))
    assert chat_of(turn, system=system, **marked("1h")) == [
        {"role": "system", "content": "Be kind.\nBe brief."},
        {"role": "user", "content": "Look:\na fish"},
    ]
    assert chat_of(HELLO, system="Be kind.")[0] == {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    ("fields", "retention_s"),
    [
        ({}, 0),
        ({"cache_control": None}, 0),
        ({"cache_control": {"type": "ephemeral"}}, 300),
        ({"system": [text("Be kind.", **marked("5m")), text("Be brief.", **marked("1h"))]}, 3600),
        ({"messages": [user(text("Hi", **marked("5m")))]}, 300),
        ({"messages": [HELLO, assistant(use() | marked("1h")), user(result())]}, 3600),
        ({"messages": [HELLO, assistant(use()), user(result(**marked("5m")))]}, 300),
        ({"messages": [HELLO, assistant(use()), user(result([text("a", **marked("1h"))]))]}, 3600),
    ],
)
def test_the_longest_time_of_a_mark_is_asked_of_the_cache(fields: Any, retention_s: int):
    assert parsed(**fields).job.options.retention_s == retention_s


@pytest.mark.parametrize(
    ("control", "param"),
    [
        ({"type": "persistent"}, "cache_control.type"),
        ({"type": "ephemeral", "ttl": "2h"}, "cache_control.ttl"),
        ("ephemeral", "cache_control"),
    ],
)
def test_a_mark_of_another_kind_is_refused(control: Any, param: str):
    for fields, start in (
        ({}, ""),
        ({"tools": [WEATHER | {"cache_control": control}]}, "tools[0]."),
        ({"messages": [user(text("Hi", cache_control=control))]}, "messages[0].content[0]."),
    ):
        with pytest.raises(InvalidRequest) as error:
            parsed(**(fields or {"cache_control": control}))
        assert error.value.param == start + param


@pytest.mark.parametrize(
    "system",
    [
        [text(BILLING), text("You are a fish.", **marked("1h"))],
        [text(f"{BILLING}\nYou are a fish.")],
        f"{BILLING}\nYou are a fish.",
        f"You are a fish.\n{BILLING}",
    ],
)
def test_the_line_that_differs_in_each_request_is_left_out(system: Any):
    assert chat_of(system=system) == [{"role": "system", "content": "You are a fish."}, HELLO]
    assert chat_of(system=[text(BILLING)]) == [HELLO], "a system of this line alone is none"


def test_such_a_line_stays_as_a_part_of_the_conversation():
    words = f"{BILLING}\nis what the log says"
    *_, last = chat_of(HELLO, assistant(use()), user(result(words), text(words)))
    assert last == {"role": "user", "content": words}


def test_turns_of_one_role_are_one():
    assert chat_of(HELLO, user(text("there")), assistant(text("Hel")), assistant(text("lo"))) == [
        {"role": "user", "content": "Hi\nthere"},
        {"role": "assistant", "content": "Hello"},
    ]


def test_calls_and_results_become_messages_of_a_chat():
    turns = [
        HELLO,
        assistant(text("I look."), use("t1", city="Ulm"), use("t2")),
        user(result("Sunny."), result([text("Rain"), text("soon")], "t2"), text("And?")),
    ]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
    other = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    assert chat_of(*turns) == [
        HELLO,
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "t1"} | call, {"id": "t2"} | other],
        },
        {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "Sunny."},
        {"role": "tool", "tool_call_id": "t2", "name": "weather", "content": "Rain\nsoon"},
        {"role": "user", "content": "And?"},
    ]


@pytest.mark.parametrize(
    ("given", "content"),
    [
        (result("no such city", is_error=True), "Error: no such city"),
        (result("Sunny.", is_error=False), "Sunny."),
        ({"type": "tool_result", "tool_use_id": "t1"}, ""),
        (result([]), ""),
    ],
)
def test_a_result_may_be_an_error_or_nothing(given: dict[str, Any], content: str):
    *_, last = chat_of(HELLO, assistant(use()), user(given))
    assert last == {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": content}


def test_a_later_system_message_is_said_where_it_stands():
    later = {"role": "system", "content": [text("It is late.")]}
    first = {"role": "system", "content": "Be brief."}
    assert chat_of(first, HELLO, later, system="Be kind.") == [
        {"role": "system", "content": "Be kind.\nBe brief."},
        {"role": "user", "content": "Hi\n<system-reminder>\nIt is late.\n</system-reminder>"},
    ]


def test_thinking_comes_back_as_reasoning():
    turn = assistant(thinking("Hm."), text("So:"), thinking("Mh.", holds_text=True), use())
    _, answer, _ = chat_of(HELLO, turn, user(result()))
    assert answer["reasoning_content"] == "Hm.\nMh."
    assert answer["content"] == "So:"


@pytest.mark.parametrize(
    "block",
    [
        thinking("Hm.") | {"thinking": "Hm!"},
        thinking("Hm.", fingerprint="another model"),
        thinking("Hm.") | {"signature": "EuYBCkQYAiJAgCs1le6/Pol5Z4/JMomVOouGrWdhYNsH3ukzUECbB"},
        thinking("Hm.") | {"signature": ""},
        thinking("Hm.", holds_text=True) | {"signature": "shoal.x.%%%"},
        {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"},
    ],
)
def test_thinking_that_is_not_this_models_is_left_out_and_named(block: dict[str, Any]):
    turns = [HELLO, assistant(block, text("So.")), user(text("Go on."))]
    job = parsed(messages=turns).job
    assert json.loads(job.prompts[0].data.tobytes())[1] == {"role": "assistant", "content": "So."}
    assert job.warnings == ("messages: thinking of another model is left out",)


def test_a_signature_knows_its_text_in_whatever_pieces_it_came():
    for words in ("", "Hm.", "Grüße 🐟"):
        for holds_text in (False, True):
            signer = Signer("f1", holds_text)
            for piece in words:
                signer.add(piece)
            signature = signer.signature()
            assert signed_text("f1", words, signature) == words
            assert signed_text("f2", words, signature) is None
            if holds_text:
                assert signed_text("f1", "", signature) == words


def test_a_last_message_of_the_assistant_is_continued():
    job = parsed(messages=[HELLO, {"role": "assistant", "content": "The answer is ("}]).job
    assert job.chat.continues_final_message
    assert not job.chat.adds_generation_prompt
    assert not parsed().job.chat.continues_final_message


@pytest.mark.parametrize(
    ("fields", "kwargs", "budget"),
    [
        ({}, {"enable_thinking": False, "thinking": False}, None),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}},
         {"enable_thinking": True, "thinking": True}, 1024),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
         {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}, None),
    ],
)  # fmt: skip
def test_a_model_thinks_if_it_is_asked_to(fields: Any, kwargs: Any, budget: int | None):
    job = parsed(**fields).job
    assert json.loads(job.chat.template_kwargs) == kwargs
    assert job.reasoning_budget == budget
    assert job.warnings == ()


@pytest.mark.parametrize(
    ("display", "shows"),
    [("summarized", True), ("updates", True), ("highlights", True), ("omitted", False)],
)
def test_thinking_has_its_text_unless_it_is_omitted(display: str, shows: bool):
    assert parsed(thinking={"type": "adaptive", "display": display}).shows_thinking is shows


def test_features_the_model_lacks_are_named_without_an_error():
    budget = {"type": "enabled", "budget_tokens": 31999, "display": "omitted"}
    asked = parsed(MODEL, thinking=budget)
    assert asked.job.warnings == ("thinking: the model has no reasoning-parser",)
    assert asked.job.reasoning_budget is None
    channels = msgspec.structs.replace(CALLER, reasoning_parser="openai_gptoss")
    (warning,) = parsed(channels, thinking=budget).job.warnings
    assert warning.startswith("thinking.budget_tokens: ")


@pytest.mark.parametrize(
    ("edits", "num_warnings"),
    [
        ([], 0),
        ([{"type": "clear_thinking_20251015", "keep": "all"}], 0),
        ([{"type": "clear_thinking_20251015"}], 1),
        ([{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}}], 1),
    ],
)
def test_clearing_that_does_not_happen_is_named(edits: list[Any], num_warnings: int):
    assert len(parsed(context_management={"edits": edits}).job.warnings) == num_warnings


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_a_text_is_held_to_a_schema(name: str):
    format = {"type": "json_schema", "schema": SCHEMA}
    fields: Any = {name: {"format": format} if name == "output_config" else format}
    job = parsed(**fields).job
    assert job.format.kind == "json_schema"
    assert json.loads(job.format.value) == SCHEMA
    assert not job.format.is_strict
    assert job.format.param.startswith(name)


def test_sampling_and_stops_match_the_client():
    sampling: Any = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}
    job = parsed(**sampling, stop_sequences=["\n\n", "END"], max_tokens=64000, stream=True).job
    params = job.params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    assert job.text.stop == ["\n\n", "END"]
    assert params.max_tokens == 64000
    assert job.text.fits_max_tokens
    assert job.is_stream


def test_fields_without_effect_are_accepted():
    neutral: Any = {
        "container": None,
        "mcp_servers": [],
        "speed": "standard",
        "service_tier": "standard_only",
        "metadata": {"user_id": "device_session"},
        "diagnostics": {"previous_message_id": None},
        "fallbacks": [],
        "inference_geo": None,
    }
    assert parsed(**neutral).job.warnings == ()
