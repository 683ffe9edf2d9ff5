"""Replies of /v1/responses, made from the mesh's updates."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.gateway.apis.responses.replies.output_items import ItemShape
from services.gateway.apis.responses.replies.shown import begun_response, is_summary
from services.gateway.apis.responses.replies.writers import (
    ResponseBody,
    ResponseMaker,
    ResponseStream,
)
from services.gateway.apis.responses.requests.parse import read_request, response_job
from services.gateway.chat.replies.formats import ChatFormat
from services.gateway.chat.replies.reply import Head, Reply
from services.gateway.mesh.output_collector import ChoiceUpdate, merged
from services.gateway.mesh.token_table import TokenTable
from shared.errors import InternalError
from shared.wire.messages import FinishReason
from tests.services.gateway.apis.responses.event_order import check_events, parsed_events
from tests.services.gateway.asking import CALLER
from tests.services.gateway.text.asking import STRUCTURED
from tests.services.gateway.text.test_parsed_replies import (
    CALL,
    CALLS,
    MARKERS,
    THOUGHT,
    Choice,
    parsers_of,
)

FUNCTIONS: Any = [{"type": "function", "name": name} for name in ("weather", "time")]
LOGPROBS = {"include": ["message.output_text.logprobs"]}
CUSTOM_CALLS = [
    *("<tool_call>", '{"name": "run", "arguments": {"input": "a\\n', '\\"b\\""}}', "</tool_call>"),
    *("<tool_call>", '{"name": "agents__wait", "arguments": {}}', "</tool_call>"),
]
WORDS = ["Hi", " you", "So", ":\n", "So:\n", "Done."]
VOCABULARY = [*MARKERS, *sorted({*THOUGHT, *CALLS, *CUSTOM_CALLS, *WORDS} - {*MARKERS})]
TABLE = TokenTable(
    np.frombuffer("".join(VOCABULARY).encode(), np.uint8),
    np.array([len(text.encode()) for text in VOCABULARY], np.int32),
)


def said(*pieces: str, reason: FinishReason = "stop", num_values: int = 0) -> list[ChoiceUpdate]:
    """Each piece is a token of the vocabulary."""
    *updates, end = Choice().say(*pieces, num_values=num_values).end(reason)
    ids = [np.array([VOCABULARY.index(piece)], np.int32) for piece in pieces]
    return [
        *(
            replace(update, arrays=update.arrays._replace(ids=each))
            for update, each in zip(updates, ids, strict=True)
        ),
        end,
    ]


def maker_of(**fields: Any) -> ResponseMaker:
    request = read_request(json.dumps({"input": "Hi", "tools": FUNCTIONS} | fields).encode())
    job = response_job(request, request.items, lambda text: None, CALLER, STRUCTURED)
    head = Head("resp_x", 1, "fish", "f1")
    spelling = TABLE.spelling(False) if job.params.logprobs is not None else None
    reply = Reply(ChatFormat(), head, job, spelling, [], [np.array([1, 2], np.int32)])
    [parser] = parsers_of(job, table=TABLE)
    encrypts = "reasoning.encrypted_content" in fields.get("include", [])
    encrypt = (lambda text: text[::-1]) if encrypts else None
    shape = ItemShape("k", request.tools, is_summary(request), encrypt)
    return ResponseMaker(reply, parser, shape, begun_response(request, job, head, False))


def whole(updates: list[ChoiceUpdate], **fields: Any) -> Any:
    writer = ResponseBody(maker_of(**fields))
    for update in updates:
        writer.add(update)
    return json.loads(b"".join(writer.write()))


def streamed(updates: list[ChoiceUpdate], **fields: Any) -> list[dict[str, Any]]:
    writer = ResponseStream(maker_of(**fields))
    pieces = [writer.open(), *(piece for update in updates for piece in writer.write(update))]
    return parsed_events(b"".join([*pieces, writer.close()]).decode())


def shown(item: Any) -> tuple[Any, ...]:
    match item:
        case {"type": "reasoning", "summary": summary, "content": content}:
            return "reasoning", [part["text"] for part in [*summary, *content]]
        case {"type": "message", "content": [{"text": text}]}:
            return "message", text
        case {"type": "function_call"}:
            return "call", item["name"], item["arguments"]
        case _:
            return "custom", item["name"], item["input"]


WEATHER, TIME = ("call", "weather", '{"city": "Köln"}'), ("call", "time", "{}")
REASONING = ("reasoning", ["Hmm"])
REPLIES: list[tuple[list[str], list[tuple[Any, ...]]]] = [
    (["Hi", " you"], [("message", "Hi you")]),
    ([], [("message", "")]),
    ([*THOUGHT, "Hi"], [REASONING, ("message", "Hi")]),
    (CALLS, [WEATHER, TIME]),
    (["So:\n", *CALLS], [("message", "So:"), WEATHER, TIME]),
    ([*THOUGHT, *CALLS], [REASONING, WEATHER, TIME]),
    ([*CALL, "</tool_call>", "Done."], [WEATHER, ("message", "Done.")]),
]


@pytest.mark.parametrize("fields", [{}, LOGPROBS, {"reasoning": {"summary": "auto"}}])
def test_a_stream_and_a_whole_reply_have_the_same_items(
    fields: dict[str, Any], subtests: pytest.Subtests
) -> None:
    num_values = 1 if "include" in fields else 0
    for pieces, expected in REPLIES:
        updates = said(*pieces, num_values=num_values)
        reply = whole(updates, **fields)
        for divided in (updates, [merged(updates)], [merged(updates[:3]), *updates[3:]]):
            with subtests.test(pieces=pieces, num_updates=len(divided)):
                assert check_events(streamed(divided, **fields)) == reply
        with subtests.test(pieces=pieces):
            assert [shown(item) for item in reply["output"]] == expected
            assert reply["status"] == "completed"
            assert all(item["status"] == "completed" for item in reply["output"])


def test_logprobs_match_the_tokens_of_the_message() -> None:
    updates = said(*THOUGHT, "So", ":\n", *CALLS, num_values=1)
    reply = whole(updates, **LOGPROBS)
    [message] = [item for item in reply["output"] if item["type"] == "message"]
    [part] = message["content"]
    # Blanks after the reasoning arrive with the following text.
    assert [entry["token"] for entry in part["logprobs"]] == ["\n\n", "So", ":\n"]
    assert part["text"] == "So:"


def test_a_text_that_is_cut_is_incomplete_and_so_is_its_last_item(
    subtests: pytest.Subtests,
) -> None:
    cases: list[tuple[list[str], Any, FinishReason, str]] = [
        (["Hi"], ("message", "Hi"), "length", "max_output_tokens"),
        (["Hi", "Hi"], ("message", "HiHi"), "repetition", "repetition"),
        (["<think>", "Hm"], ("reasoning", ["Hm"]), "length", "max_output_tokens"),
        ([*THOUGHT, *CALL[:3]], ("call", "weather", '{"city": "'), "length", "max_output_tokens"),
    ]
    for pieces, last, reason, why in cases:
        with subtests.test(pieces=pieces):
            updates = said(*pieces, reason=reason)
            reply = check_events(streamed(updates))
            assert reply == whole(updates)
            assert reply["status"] == "incomplete"
            assert reply["incomplete_details"] == {"reason": why}
            *others, item = reply["output"]
            assert shown(item) == last
            assert item["status"] == "incomplete"
            assert all(other["status"] == "completed" for other in others)


def test_a_call_that_the_text_ends_in_is_incomplete() -> None:
    """After a stop string, for example: its arguments may be incomplete."""
    reply = check_events(streamed(said(*CALL[:3])))
    assert reply["status"] == "completed"
    assert [item["status"] for item in reply["output"]] == ["incomplete"]
    assert check_events(streamed(said(*CALLS)))["output"][-1]["status"] == "completed"


def test_an_aborted_response_is_cancelled_and_keeps_its_text() -> None:
    events = streamed(said("Hi", reason="abort"))
    reply = check_events(events)
    assert events[-1]["type"] == "response.incomplete"
    assert reply["status"] == "cancelled"
    assert shown(reply["output"][0]) == ("message", "Hi")
    assert whole(said(reason="abort"))["output"] == []


def test_a_failed_stream_ends_with_the_error_and_its_partial_output() -> None:
    writer = ResponseStream(maker_of())
    first, *_ = said("Hi")
    pieces = [writer.open(), *writer.write(first), writer.fail(InternalError("it broke"))]
    events = parsed_events(b"".join(pieces).decode())
    reply = check_events(events)
    assert reply["status"] == "failed"
    assert reply["error"] == {"code": "internal_error", "message": "it broke"}
    assert shown(reply["output"][0]) == ("message", "Hi")


def test_the_usage_counts_reasoning() -> None:
    usage = whole(said(*THOUGHT, "Hi"))["usage"]
    assert usage["input_tokens"] == 2
    assert usage["output_tokens"] == len(THOUGHT) + 1
    assert usage["output_tokens_details"] == {"reasoning_tokens": 2}
    assert usage["input_tokens_details"]["cached_tokens"] == 0


def test_a_summary_is_the_reasoning_and_can_be_encrypted() -> None:
    updates = said(*THOUGHT, "Hi")
    include = ["reasoning.encrypted_content"]
    reasoning = {"summary": "detailed", "effort": "low"}
    reply = check_events(streamed(updates, include=include, reasoning=reasoning))
    item = reply["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "Hmm"}]
    assert item["content"] == []
    assert item["encrypted_content"] == "mmH"
    assert reply["reasoning"] == reasoning
    item = whole(updates)["output"][0]
    assert item["content"] == [{"type": "reasoning_text", "text": "Hmm"}]
    assert "encrypted_content" not in item


def test_a_custom_tool_gets_a_text_and_a_function_of_a_namespace_its_own_name() -> None:
    tools = [
        {"type": "custom", "name": "run"},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "wait"}]},
    ]
    updates = said(*CUSTOM_CALLS)
    reply = check_events(streamed(updates, tools=tools))
    assert reply == whole(updates, tools=tools)
    custom, function = reply["output"]
    assert (custom["type"], custom["name"], custom["input"]) == (
        "custom_tool_call",
        "run",
        'a\n"b"',
    )
    assert (function["name"], function["namespace"]) == ("wait", "agents")


def test_without_parallel_calls_the_first_is_all() -> None:
    updates = said(*CALLS)
    reply = whole(updates, parallel_tool_calls=False)
    assert [shown(item) for item in reply["output"]] == [WEATHER]
    assert check_events(streamed(updates, parallel_tool_calls=False)) == reply
