"""Tools, from the client to the engine and back, by real processes and OpenAI's own client."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from pydantic import BaseModel

from benchmarks.harness.fleet import running_fleet
from tests.mesh.forks import fork
from tests.mesh.structured import client_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS = {"DTYPE": "float32", "MAX_MODEL_LEN": "1024", "NUM_THREADS": "1"}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOCK = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in (("weather", WEATHER), ("clock", CLOCK))
]
SCHEMAS: dict[str, dict[str, Any]] = {"weather": WEATHER, "clock": CLOCK}
MESSAGES: Any = [{"role": "user", "content": "How is the weather in Rome?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncOpenAI]:
    directory: Path = tmp_path_factory.mktemp("tools")
    async with running_fleet(directory, SETTINGS, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=1)
        async with client_of(fleet.of("gateway")[0].url) as client:
            yield client
        await fleet.until_idle()


async def ask(client: AsyncOpenAI, **more: Any) -> Any:
    defaults: dict[str, Any] = {"tools": TOOLS, "max_tokens": 200, "temperature": 1, "seed": 5}
    return await client.chat.completions.create(
        model="shoal-tiny", messages=MESSAGES, **defaults | more
    )


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]


async def streamed(client: AsyncOpenAI, **more: Any) -> tuple[list[dict[str, str]], str, str]:
    """Calls, content and the finish reason of a stream, with strings joined as clients do."""
    calls: list[dict[str, str]] = []
    content, reason = "", ""
    async for chunk in await ask(client, stream=True, **more):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or ():
                if part.index == len(calls):
                    assert part.type == "function"
                    calls.append({"id": "", "name": "", "arguments": ""})
                call = calls[part.index]
                call["id"] += part.id or ""
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
    return calls, content, reason


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"prompt_logprobs": 0}])
async def test_a_request_that_forbids_every_token_is_its_clients_and_harms_no_other(
    client: AsyncOpenAI, fields: dict[str, Any]
):
    """A choice of one letter with no allowed token, as a reply and as a stream."""
    others = [asyncio.create_task(streamed(client, tool_choice="none")) for _ in range(2)]
    extra: Any = {"structured_outputs": {"choice": ["fish"]}, "allowed_token_ids": [3]} | fields
    with pytest.raises(openai.BadRequestError, match="forbids every token") as error:
        await ask(client, tools=openai.omit, extra_body=extra)
    assert error.value.code == "no_token_allowed"
    if "prompt_logprobs" not in fields:
        stream = await ask(client, tools=openai.omit, extra_body=extra, stream=True)
        with pytest.raises(openai.APIError, match="forbids every token") as failed:
            async for _ in stream:
                pass
        assert failed.value.code == "no_token_allowed"
    (first, second) = await asyncio.gather(*others)
    assert first == second
    assert first[2] in ("stop", "length")


async def test_required_calls_are_valid_and_a_stream_of_them_is_the_same(client: AsyncOpenAI):
    """The model may call without end, until its output is cut."""
    reasons = []
    for seed in range(4):
        (choice,) = (await ask(client, tool_choice="required", seed=seed)).choices
        calls, content, reason = await streamed(client, tool_choice="required", seed=seed)
        assert choice.finish_reason == reason
        reasons.append(reason)
        if reason == "tool_calls":  # otherwise a call may be cut within its marker
            assert not content
            assert choice.message.content is None
        assert calls_of(choice) == [(call["name"], call["arguments"]) for call in calls]
        assert len({call["id"] for call in calls}) == len(calls) > 0
        for call in calls if reason == "tool_calls" else calls[:-1]:
            jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
    assert "tool_calls" in reasons


async def test_a_named_function_is_called_once_and_that_is_a_stop(client: AsyncOpenAI):
    named = {"type": "function", "function": {"name": "clock"}}
    (choice,) = (await ask(client, tool_choice=named)).choices
    assert choice.finish_reason == "stop"
    ((name, arguments),) = calls_of(choice)
    assert name == "clock"
    assert json.loads(arguments)["zone"] in ("UTC", "CET")


async def test_a_text_that_ends_after_its_only_call_ends_once_and_counts_the_same(
    client: AsyncOpenAI,
):
    """Its call is complete before its last token, or with it."""
    named = {"type": "function", "function": {"name": "clock"}}
    dones = await asyncio.gather(*(ask(client, tool_choice=named) for _ in range(24)))
    assert len({done.usage.completion_tokens for done in dones}) == 1
    streams = await asyncio.gather(*(streamed(client, tool_choice=named) for _ in range(24)))
    assert all(reason == "stop" and len(calls) == 1 for calls, _, reason in streams)


async def test_a_call_that_a_stop_string_cuts_is_none(client: AsyncOpenAI):
    (choice,) = (await ask(client, tool_choice="required", stop=["zone", "city"])).choices
    assert choice.finish_reason == "stop"


async def test_parallel_tool_calls_false_is_one_call_of_each_choice(client: AsyncOpenAI):
    done = await ask(client, tool_choice="required", parallel_tool_calls=False, n=4)
    assert [len(calls_of(choice)) for choice in done.choices] == [1] * 4


async def test_tools_that_may_not_be_called_are_not(client: AsyncOpenAI):
    (choice,) = (await ask(client, tool_choice="none", max_tokens=20)).choices
    assert choice.message.tool_calls is None
    assert choice.message.content


async def test_a_reply_is_parsed_into_the_model_of_the_client(client: AsyncOpenAI):
    class Fish(BaseModel):
        name: str
        legs: int
        is_wet: bool

    done = await client.chat.completions.parse(
        model="shoal-tiny", messages=MESSAGES, response_format=Fish, max_tokens=300, seed=3
    )
    assert isinstance(done.choices[0].message.parsed, Fish)


async def test_a_conversation_with_results_of_tools_goes_on(client: AsyncOpenAI):
    (choice,) = (await ask(client, tool_choice="required", parallel_tool_calls=False)).choices
    (call,) = choice.message.tool_calls
    said: Any = choice.message.model_dump(exclude_none=True)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 25 degrees."}
    done = await client.chat.completions.create(
        model="shoal-tiny",
        messages=[*MESSAGES, said, result],
        tools=TOOLS,
        max_tokens=8,
    )
    assert done.usage
    assert done.usage.completion_tokens > 0


async def test_logprobs_of_a_call_match_all_its_tokens(client: AsyncOpenAI):
    more = {"tool_choice": "required", "logprobs": True, "top_logprobs": 2}
    done = await ask(client, **more)
    whole = [each.token for each in done.choices[0].logprobs.content]
    assert len(whole) == done.usage.completion_tokens
    parts: list[str] = []
    async for chunk in await ask(client, stream=True, **more):
        for choice in chunk.choices:
            parts += [each.token for each in choice.logprobs.content] if choice.logprobs else []
    assert parts == whole
