"""Anthropic's own client, unchanged: messages, streams, tools, counts, errors."""

from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from pydantic import BaseModel

MULTIPLY: Any = {
    "name": "multiply",
    "description": "Multiplies two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
QUESTION: Any = {"role": "user", "content": "What is 1234 * 56?"}
TALK: Any = {"role": "user", "content": "What does the scheduler do?"}
ASKED: Any = {"model": "shoal-tiny", "max_tokens": 100, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="session")
def client(url: str) -> Anthropic:
    return Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)


def test_a_message_is_answered(client: Anthropic):
    reply = client.messages.create(**ASKED, messages=[TALK], system="Be brief.")
    assert reply.content[0].type == "text"
    assert reply.content[0].text
    assert reply.stop_reason == "end_turn"
    assert reply.id == f"msg_{reply._request_id}"
    assert reply.usage.output_tokens > 0


def test_a_stream_is_the_same_message(client: Anthropic):
    whole = client.messages.create(**ASKED, messages=[TALK])
    with client.messages.stream(**ASKED, messages=[TALK]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


async def test_events_come_without_the_helper_too(url: str):
    async with AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none") as client:
        stream = await client.messages.create(**ASKED, messages=[TALK], stream=True)
        kinds = [event.type async for event in stream]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_is_used_and_its_result_is_taken(client: Anthropic, is_stream: bool):
    asked = {**ASKED, "messages": [QUESTION], "tools": [MULTIPLY]}
    if is_stream:
        with client.messages.stream(**asked) as stream:
            reply = stream.get_final_message()
    else:
        reply = client.messages.create(**asked)
    assert reply.stop_reason == "tool_use"
    use = reply.content[-1]
    assert use.type == "tool_use"
    assert use.input == {"a": 1234, "b": 56}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "69104"}
    turns: Any = [
        QUESTION,
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**ASKED, messages=turns, tools=[MULTIPLY])
    assert "69104" in answer.content[0].text


def test_a_tool_may_be_demanded(client: Anthropic):
    reply = client.messages.create(
        **ASKED, messages=[TALK], tools=[MULTIPLY], tool_choice={"type": "tool", "name": "multiply"}
    )
    assert reply.stop_reason == "tool_use"
    assert reply.content[0].input.keys() == {"a", "b"}


def test_a_text_becomes_an_object(client: Anthropic):
    class Person(BaseModel):
        name: str
        age: int

    asked: Any = {"role": "user", "content": "As JSON: Ada is 31 and lives in Rome."}
    reply = client.messages.parse(**ASKED, messages=[asked], output_format=Person)
    assert isinstance(reply.parsed_output, Person)


def test_thinking_is_asked_for_in_vain_and_said_so(client: Anthropic):
    budget: Any = {"type": "enabled", "budget_tokens": 1024}
    raw = client.messages.with_raw_response.create(**ASKED, messages=[TALK], thinking=budget)
    assert raw.headers["x-shoal-warnings"].startswith("thinking: ")
    assert raw.parse().content[0].type == "text"


def test_tokens_are_counted(client: Anthropic):
    asked: Any = {"messages": [QUESTION], "tools": [MULTIPLY], "system": "Be brief."}
    count = client.messages.count_tokens(model="shoal-tiny", **asked)
    usage = client.messages.create(**ASKED, **asked).usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_models_are_listed(client: Anthropic):
    assert [model.id for model in client.models.list()] == ["shoal-tiny"]
    assert client.models.retrieve("shoal-tiny").max_input_tokens == 2048


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"model": "claude-fish"}, anthropic.NotFoundError, "claude-fish"),
        ({"messages": []}, anthropic.BadRequestError, "messages is []"),
        (
            {"messages": [TALK | {"content": [{"type": "image"}]}]},
            anthropic.BadRequestError,
            "messages.0.content.0.source",
        ),
    ],
)
def test_an_error_is_of_its_class(
    client: Anthropic, fields: dict[str, Any], kind: type[anthropic.APIStatusError], words: str
):
    with pytest.raises(kind) as raised:
        client.messages.create(**{**ASKED, "messages": [TALK], **fields})
    assert words in raised.value.message
    assert raised.value.body["type"] == "error"


def test_the_beta_endpoint_is_the_same(client: Anthropic):
    reply = client.beta.messages.create(
        **ASKED, messages=[TALK], betas=["interleaved-thinking-2025-05-14"]
    )
    assert reply.content[0].text
