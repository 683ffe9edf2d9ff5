"""Chats with reasoning and tool calls, through a gateway with OpenAI's own client."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from openai import AsyncOpenAI

from services.gateway.service import GatewayService
from shared.wire.messages import (
    Lost,
    OutputStart,
    RequestKey,
    State,
)
from tests.services.gateway.asking import MESSAGES, tool
from tests.services.gateway.fakes import (
    FakeTokenizer,
    Submitted,
    running_gateway,
    until,
)
from tests.services.gateway.marked import CALL, REPLY, accept, marking_tokenizer, say

TOOLS: Any = [tool("weather")]


@pytest.fixture
async def tokenizer(tmp_path: Path) -> AsyncIterator[FakeTokenizer]:
    async with marking_tokenizer(tmp_path) as fake:
        yield fake


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
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So:"
    assert choice.message.model_extra == {"reasoning": "Hm", "reasoning_content": "Hm"}
    calls: Any = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["weather", "weather"]
    assert {call.function.arguments for call in calls} == {'{"city": "Ulm"}'}
    assert len({call.id for call in calls}) == 2
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
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
    async with openai.chat.completions.stream(
        model="fish", messages=MESSAGES, tools=TOOLS
    ) as stream:
        async for _ in stream:
            pass
        choice: Any = (await stream.get_final_completion()).choices[0]
    replay = await serving
    assert replay.submit.choices[0].num_marks == 2
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So:"
    calls = choice.message.tool_calls
    assert [call.function.arguments for call in calls] == ['{"city": "Ulm"}'] * 2
    assert [call.function.name for call in calls] == ["weather", "weather"]
    assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_ends_after_its_only_call_and_the_others_go_on(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, stream: bool
) -> None:
    body = {
        "messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False, "n": 2,
        "stream": stream, "include_reasoning": False,
    }  # fmt: skip
    posting = asyncio.create_task(post(http, body))
    request = await tokenizer.submitted.get()
    accept(request, OutputStart.ANSWER)
    say(request, *CALL, *CALL)
    say(request, "Hi", choice=1)
    assert tokenizer.cancelled.empty()
    request.finish(choice=1)
    text = await posting
    cancel = await tokenizer.cancelled.get()
    assert cancel.keys == [RequestKey(*request.key)], "the tokenizer is still at the first choice"
    assert text.count('"finish_reason":"tool_calls"') == text.count('"finish_reason":"stop"') == 1
    assert text.count('"name":"weather"') == 1


async def test_a_request_ends_after_its_only_call(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False}
    posting = asyncio.create_task(post(http, body))
    request = await tokenizer.submitted.get()
    accept(request, OutputStart.ANSWER)
    say(request, *CALL, "\n")
    assert '"finish_reason":"tool_calls"' in await posting
    assert (await tokenizer.cancelled.get()).keys == [RequestKey(*request.key)]


async def post(http: aiohttp.ClientSession, body: dict[str, Any]) -> str:
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        return await response.text()


async def test_the_setting_names_the_field_of_reasoning(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    async with running_gateway(tmp_path, reasoning_field="reasoning") as gateway:
        await until(lambda: gateway.status().state == State.READY)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http:
            posting = asyncio.create_task(post(http, {"messages": MESSAGES}))
            request = await tokenizer.submitted.get()
            accept(request)
            say(request, "Hm", "</think>", "Hi")
            request.finish()
            message = msgspec.json.decode(await posting)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hi", "refusal": None, "reasoning": "Hm"}


async def test_the_models_show_their_parsers(
    http: aiohttp.ClientSession, gateway: GatewayService
) -> None:
    async with http.get("/v1/models") as response:
        models = (await response.json())["data"]
    parsers = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
    assert [model["shoal"] for model in models] == [parsers] * 2
