"""Chats with reasoning and tool calls, through a gateway with OpenAI's own client."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from shared.wire.messages import Lost, OutputStart, RequestKey
from tests.services.gateway.asking import CALLER, MESSAGES, tool
from tests.services.gateway.client import CHAT, Client, with_model, with_settings
from tests.services.gateway.fakes import FakeTokenizer, Submitted
from tests.services.gateway.marked import CALL, REPLY, accept, say

TOOLS: Any = [tool("weather")]
pytestmark = with_model(CALLER)


def check(choice: Any) -> None:
    """Of ``REPLY``."""
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So:"
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["weather", "weather"]
    assert [call.function.arguments for call in calls] == ['{"city": "Ulm"}'] * 2
    assert len({call.id for call in calls}) == 2


async def test_a_reply_has_reasoning_content_and_calls(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    asking = asyncio.create_task(
        openai.chat.completions.create(model="fish", messages=MESSAGES, tools=TOOLS)
    )
    request = await tokenizer.submitted.get()
    accept(request)
    say(request, *REPLY)
    request.finish()
    reply = await asking
    [choice] = reply.choices
    check(choice)
    assert choice.message.model_extra == {"reasoning": "Hm", "reasoning_content": "Hm"}
    assert reply.usage.completion_tokens_details.reasoning_tokens == 1


async def test_openais_client_adds_up_a_stream_that_a_replay_interrupts(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    cut = REPLY.index(CALL[1]) + 1

    async def serve() -> Submitted:
        request = await tokenizer.submitted.get()
        accept(request)
        say(request, *REPLY[:cut])
        request.peer.send(Lost([RequestKey(*request.key)]))
        request = await tokenizer.submitted.get()
        accept(request, OutputStart.ANSWER)
        say(request, *REPLY[cut:], before=cut)
        request.finish()
        return request

    serving = asyncio.create_task(serve())
    asked: Any = {"model": "fish", "messages": MESSAGES, "tools": TOOLS}
    async with openai.chat.completions.stream(**asked) as stream:
        async for _ in stream:
            pass
        check((await stream.get_final_completion()).choices[0])
    assert (await serving).submit.choices[0].num_marks == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_ends_after_its_only_call_and_the_others_go_on(
    client: Client, stream: bool
) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False, "n": 2}
    asked, request = await client.begun(CHAT, **body, stream=stream, include_reasoning=False)
    accept(request, OutputStart.ANSWER)
    say(request, *CALL, *CALL)
    say(request, "Hi", choice=1)
    assert client.tokenizer.cancelled.empty()
    request.finish(choice=1)
    text = (await asked).text
    cancel = await client.tokenizer.cancelled.get()
    assert cancel.keys == [RequestKey(*request.key)], "the tokenizer is still at the first choice"
    assert text.count('"finish_reason":"tool_calls"') == text.count('"finish_reason":"stop"') == 1
    assert text.count('"name":"weather"') == 1


async def test_a_request_ends_after_its_only_call(client: Client) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False}
    asked, request = await client.begun(CHAT, **body)
    accept(request, OutputStart.ANSWER)
    say(request, *CALL, "\n")
    assert (await asked).choices[0]["finish_reason"] == "tool_calls"
    assert (await client.tokenizer.cancelled.get()).keys == [RequestKey(*request.key)]


@with_settings(reasoning_field="reasoning")
async def test_the_setting_names_the_field_of_reasoning(client: Client) -> None:
    asked, request = await client.begun(CHAT, messages=MESSAGES)
    accept(request)
    say(request, "Hm", "</think>", "Hi")
    message = (await client.finish(asked, request)).choices[0]["message"]
    assert message == {"role": "assistant", "content": "Hi", "refusal": None, "reasoning": "Hm"}


async def test_the_models_show_their_parsers(client: Client) -> None:
    models = (await client.get("/v1/models")).json["data"]
    parsers = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
    assert [model["shoal"] for model in models] == [parsers] * 2
