"""The length limit of a chat: by request and by setting, and the client's notice."""

import json
from typing import Any

import numpy as np
import pytest

from services.gateway.apis.messages.requests.parse import parse_messages
from services.gateway.apis.responses.requests.parse import read_request, response_job
from services.gateway.apis.tokenization.requests import parse_tokenize
from services.gateway.chat.requests.parse import Limits, parse_chat
from services.gateway.mesh.job import Job
from shared.errors import InvalidRequest
from shared.wire.messages import Accepted, Dropped, OutputStart
from tests.services.gateway.asking import MESSAGES, check_refusals
from tests.services.gateway.client import CHAT, Client, with_settings
from tests.services.gateway.fakes import MODEL, PROMPT_IDS

CONTEXT = MODEL.max_model_len
DROPPED = Dropped(3, 70)
BODIES: dict[str, Any] = {
    CHAT: {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
}


def limit_of(job: Job) -> int:
    assert job.chat is not None
    return job.chat.history_limit


def body(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def of_chat(setting: int, **fields: Any) -> int:
    limits = Limits(8, 20, history_limit=setting)
    return limit_of(parse_chat(body({"messages": MESSAGES} | fields), MODEL, limits))


def of_response(setting: int, **fields: Any) -> int:
    request = read_request(body({"input": "Hi"} | fields))
    limits = Limits(8, 20, history_limit=setting)
    return limit_of(response_job(request, request.items, lambda sealed: None, MODEL, limits))


def of_message(setting: int, max_tokens: int) -> int:
    fields = {"messages": MESSAGES, "max_tokens": max_tokens}
    limits = Limits(8, 20, history_limit=setting)
    return limit_of(parse_messages(body(fields), MODEL, limits).job)


def test_a_request_comes_before_the_setting_and_both_leave_room_for_the_text():
    assert CONTEXT == 64
    for setting, asked, max_tokens, expected in [
        (0, None, None, 0),
        (0, 0, None, 0),
        (0, 20, None, 20),
        (0, 20, 50, 14),
        (0, 64, None, 63),
        (0, 1000, 4, 60),
        (0, -1, None, 48),
        (0, -1, 4, 60),
        (30, None, None, 30),
        (30, None, 60, 4),
        (30, 0, None, 0),
        (30, 40, None, 40),
        (-1, None, 4, 60),
        (-1, None, 64, 0),
        (20, None, 64, 0),
    ]:
        fields = {"history_limit": asked, "max_tokens": max_tokens}
        assert of_chat(setting, **fields) == expected, (setting, fields)
    assert of_chat(0, history_limit=20, max_completion_tokens=50) == 14


def test_a_prompt_that_is_cut_by_tokens_keeps_its_turns():
    assert of_chat(30, truncate_prompt_tokens=5) == 0
    assert of_chat(30, truncate_prompt_tokens=5, history_limit=0) == 0


def test_malformed_limits_are_refused(subtests: pytest.Subtests):
    wrong: list[Any] = [
        ({"history_limit": -2}, "history_limit", ">= -1"),
        ({"history_limit": "auto"}, "history_limit", "expected int"),
        (
            {"history_limit": 5, "truncate_prompt_tokens": 5},
            "history_limit",
            "without truncate_prompt_tokens only",
        ),
    ]
    check_refusals(wrong, subtests)
    with pytest.raises(InvalidRequest) as error:
        of_response(0, truncation="auto", truncate_prompt_tokens=5)
    assert error.value.param == "truncation"


def test_truncation_of_a_response_is_as_much_as_fits():
    assert of_response(0, truncation="auto") == 48
    assert of_response(0, truncation="auto", max_output_tokens=4) == 60
    assert (of_response(0), of_response(30)) == (0, 30)
    assert of_response(30, truncation="disabled") == 0


def test_a_message_asks_for_no_room_that_the_context_does_not_have():
    assert (of_message(0, 5), of_message(30, 5)) == (0, 30)
    assert (of_message(-1, 5), of_message(-1, 64_000), of_message(30, 64_000)) == (59, 48, 30)


def test_tokenize_drops_turns_on_request():
    for asked, expected in [(None, 0), (20, 20), (-1, 48)]:
        conversion = parse_tokenize(body({"messages": MESSAGES, "history_limit": asked}), MODEL)
        assert conversion.chat is not None
        assert conversion.chat.history_limit == expected
    with pytest.raises(InvalidRequest, match="with messages only"):
        parse_tokenize(body({"prompt": "a", "history_limit": 20}), MODEL)


@with_settings(history_limit=20)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_learns_of_dropped_turns(client: Client, path: str, stream: bool):
    fields = BODIES[path] | {"stream": stream}
    if stream and path == CHAT:
        fields["stream_options"] = {"include_usage": True}
    for dropped in (DROPPED, Dropped()):
        asked, request = await client.begun(path, **fields)
        assert request.submit.chat.history_limit == 20
        ids = np.array(PROMPT_IDS, np.int32)
        request.peer.send(Accepted(*request.key, OutputStart.ANSWER, dropped), ids)
        request.text("Hi")
        answer = await client.finish(asked, request)
        expected = {"dropped_tokens": 70, "dropped_turns": 3} if dropped.num_turns else {}
        assert answer.headers.get("X-Shoal-Dropped-Turns") == ("3" if expected else None)
        usage = last_usage(answer.text)
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
        assert {name: details[name] for name in details if "dropped" in name} == expected


def last_usage(text: str) -> dict[str, Any]:
    datas = [line.removeprefix("data: ") for line in text.splitlines() if '"usage"' in line]
    events = [json.loads(data) for data in datas]
    usages = [each.get("usage") or each.get("response", {}).get("usage") for each in events]
    found: dict[str, Any] = [usage for usage in usages if usage][-1]
    return found
