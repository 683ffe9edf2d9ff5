"""/v1/responses by real processes and OpenAI's own client; each stream's events are checked."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from pydantic import BaseModel

from benchmarks.harness.fleet import Fleet, running_fleet
from tests.mesh.forks import fork
from tests.mesh.long_model import long_model
from tests.mesh.structured import client_of
from tests.mesh.thinking_model import make_thinking_model
from tests.services.gateway.apis.responses.event_order import check_events

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "shoal-tiny"
SETTINGS = {"DTYPE": "float32", "MAX_MODEL_LEN": "1024", "NUM_THREADS": "1"}
RECORDED = Path(__file__).parent / "recorded"
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
MULTIPLY: Any = {
    "type": "function",
    "name": "multiply",
    "description": "Multiplies two numbers.",
    "parameters": NUMBERS,
    "strict": True,
}
TEMPLATE = "{% for each in messages %}{{ each.reasoning_content }}{{ each.content }}{% endfor %}"
RUN: Any = {
    "type": "custom",
    "name": "run",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[a-c]{3,9}"},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Two gateways with one store."""
    directory: Path = tmp_path_factory.mktemp("responses")
    settings = SETTINGS | {"RESPONSE_STORE": str(directory / "store.db")}
    async with running_fleet(directory, settings, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=2)
        yield fleet
        await fleet.until_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(fleet: Fleet) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(fleet.of("gateway")[0].url) as client:
        yield client


async def streamed(client: AsyncOpenAI, **fields: Any) -> Any:
    """The final response of a stream with valid events."""
    stream = await client.responses.create(model=MODEL, stream=True, **fields)
    return check_events([event.to_dict() async for event in stream])


async def test_a_stream_ends_with_the_response_that_is_given_whole(client: AsyncOpenAI):
    fields: dict[str, Any]
    for fields in (
        {"input": "What is 12 + 30?"},
        {"input": "What does the scheduler do?", "max_output_tokens": 12},
        {"input": "What is 1234 * 56?", "tools": [MULTIPLY]},
        {"input": "Hi", "tools": [RUN], "tool_choice": {"type": "custom", "name": "run"}},
        {
            "input": "What is 12 + 30?",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        },
    ):
        whole = await client.responses.create(model=MODEL, temperature=0, **fields)
        reply = await streamed(client, temperature=0, **fields)
        assert reply["status"] == whole.status
        whole_output: Any = whole.to_dict()["output"]
        for item, other in zip(reply["output"], whole_output, strict=True):
            assert {**item, "id": "", "call_id": ""} == {**other, "id": "", "call_id": ""}


async def test_a_sum_is_answered_and_a_cut_is_incomplete(client: AsyncOpenAI):
    whole = await client.responses.create(model=MODEL, input="What is 12 + 30?", temperature=0)
    assert "42" in whole.output_text
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    cut = await client.responses.create(
        model=MODEL, input="What does the scheduler do?", temperature=0, max_output_tokens=5
    )
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.usage is not None
    assert cut.usage.output_tokens == 5


async def test_logprobs_match_the_text(client: AsyncOpenAI):
    reply: Any = await client.responses.create(
        model=MODEL,
        input="What is 12 + 30?",
        temperature=0,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        tools=[MULTIPLY],
        tool_choice="none",
    )
    [part] = reply.output[0].content
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


async def test_the_stream_helper_follows_the_events(client: AsyncOpenAI):
    async with client.responses.stream(
        model=MODEL, input="What is 1234 * 56?", tools=[MULTIPLY], temperature=0
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[-1] == "response.completed"
    [call] = final.output
    assert call.type == "function_call"
    assert call.parsed_arguments == {"a": 1234, "b": 56}


async def test_a_reply_is_parsed_into_the_model_of_the_client(client: AsyncOpenAI):
    class Person(BaseModel):
        name: str
        age: int
        city: str

    reply = await client.responses.parse(
        model=MODEL,
        input="As JSON: Ada is 31 and lives in Rome.",
        text_format=Person,
        temperature=0,
    )
    assert reply.output_parsed == Person(name="Ada", age=31, city="Rome")


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_loop_of_tools_ends_with_an_answer(client: AsyncOpenAI, is_kept: bool):
    """By the previous response's id, or by sending all items again."""
    items: list[Any] = [{"role": "user", "content": "What is 1234 * 56?"}]
    first = await client.responses.create(
        model=MODEL, input=items, tools=[MULTIPLY], temperature=0, store=is_kept
    )
    [call] = first.output
    assert call.type == "function_call"
    numbers = json.loads(call.arguments)
    jsonschema.validate(numbers, NUMBERS)
    output = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": str(numbers["a"] * numbers["b"]),
    }
    again: dict[str, Any] = {"input": [*items, *first.output, output]}
    if is_kept:
        again = {"input": [output], "previous_response_id": first.id}
    second = await client.responses.create(
        model=MODEL, tools=[MULTIPLY], temperature=0, store=is_kept, **again
    )
    assert "69104" in second.output_text
    num_tokens = await client.responses.input_tokens.count(model=MODEL, tools=[MULTIPLY], **again)
    assert second.usage is not None
    assert num_tokens.input_tokens == second.usage.input_tokens


async def test_a_conversation_goes_on_through_another_gateway(client: AsyncOpenAI, fleet: Fleet):
    first = await client.responses.create(model=MODEL, input="What is 12 + 30?", temperature=0)
    async with client_of(fleet.of("gateway")[1].url) as other:
        second = await other.responses.create(
            model=MODEL, input="And 1 + 1?", temperature=0, previous_response_id=first.id
        )
        assert "2" in second.output_text
        found = await other.responses.retrieve(first.id)
        assert found.to_dict() == first.to_dict()
    items = await client.responses.input_items.list(second.id)
    assert [item.to_dict()["content"] async for item in items] == [
        [{"type": "input_text", "text": "And 1 + 1?"}]
    ]
    await client.responses.delete(first.id)
    async with client_of(fleet.of("gateway")[1].url) as other:
        with pytest.raises(Exception, match="there is no response"):
            await other.responses.retrieve(first.id)


async def test_many_at_once_through_two_gateways_are_all_kept(client: AsyncOpenAI, fleet: Fleet):
    async with client_of(fleet.of("gateway")[1].url) as other:
        asked = [
            each.responses.create(
                model=MODEL, input=f"What is {number} + 1?", temperature=0, max_output_tokens=16
            )
            for number in range(12)
            for each in (client, other)
        ]
        replies = await asyncio.gather(*asked)
        found = await asyncio.gather(*(other.responses.retrieve(each.id) for each in replies))
    assert [each.to_dict() for each in found] == [each.to_dict() for each in replies]


async def test_one_in_the_background_is_read_through_another_gateway(
    client: AsyncOpenAI, fleet: Fleet
):
    """It has failed when its own gateway is killed."""
    maker = fleet.of("gateway")[1]
    asked: Any = {"model": MODEL, "input": "What is 12 + 30?", "temperature": 0, "background": True}
    async with client_of(maker.url) as other:
        good = await other.responses.create(**asked)
        found = await until_not(client, good.id, "queued", "in_progress")
        assert (found.status, found.output_text) == ("completed", "12 + 30 = 42")
        endless = {"max_output_tokens": 900, "extra_body": {"ignore_eos": True}}
        lost = await other.responses.create(**asked | endless)
        await until_not(client, lost.id, "queued")
    await fleet.kill(maker)
    found = await until_not(client, lost.id, "queued", "in_progress")
    assert found.status == "failed"
    assert found.error.code == "gateway_lost"
    await fleet.start("gateway")
    await fleet.until_ready()


async def until_not(client: AsyncOpenAI, response_id: str, *statuses: str) -> Any:
    async with asyncio.timeout(60):
        while (found := await client.responses.retrieve(response_id)).status in statuses:
            await asyncio.sleep(0.05)
    return found


async def test_a_custom_tool_gets_a_text_of_its_expression(client: AsyncOpenAI):
    reply = await streamed(
        client,
        input="Run it.",
        tools=[RUN],
        tool_choice={"type": "custom", "name": "run"},
        temperature=1,
        extra_body={"seed": 3},
    )
    [call] = reply["output"]
    assert call["type"] == "custom_tool_call"
    assert 3 <= len(call["input"]) <= 9
    assert set(call["input"]) <= set("abc")


async def test_a_schema_that_cannot_be_held_is_named_as_the_client_knows_it(client: AsyncOpenAI):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}}
    form: Any = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    with pytest.raises(Exception, match=r"text\.format\.schema"):
        await client.responses.create(model=MODEL, input="Hi", text={"format": form})
    with pytest.raises(Exception, match=r"tools\[0\]\.parameters"):
        await client.responses.create(
            model=MODEL,
            input="Hi",
            tools=[MULTIPLY | {"parameters": schema}],
            tool_choice="required",
        )


@pytest.mark.slow
async def test_a_worker_that_dies_is_not_noticed(client: AsyncOpenAI, fleet: Fleet):
    fields: dict[str, Any] = {
        "input": "What does the scheduler do?",
        "temperature": 1,
        "max_output_tokens": 300,
        "extra_body": {"ignore_eos": True, "seed": 11},
    }
    before = await streamed(client, **fields)
    stream = await client.responses.create(model=MODEL, stream=True, **fields)
    events: list[Any] = []
    async for event in stream:
        events.append(event.to_dict())
        if len(events) == 40:
            [worker] = fleet.of("worker")
            os.kill(worker.process.pid, signal.SIGKILL)
            await fleet.start("worker")
    reply = check_events(events)
    assert reply["output"][0]["content"] == before["output"][0]["content"]
    assert reply["usage"]["output_tokens"] == 300


@pytest.mark.slow
async def test_requests_of_codex_are_answered(tmp_path_factory: pytest.TempPathFactory):
    """Its first request, and the one with a call's result; texts in them are shortened."""
    directory = tmp_path_factory.mktemp("codex")
    (model := directory / "long").mkdir()
    settings = SETTINGS | {"MODEL": str(long_model(model, 32768)), "MAX_MODEL_LEN": "32768"}
    async with running_fleet(directory, settings, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=1)
        async with client_of(fleet.of("gateway")[0].url) as client:
            for body in json.loads((RECORDED / "responses-codex.json").read_text())["requests"]:
                body |= {"model": "long", "max_output_tokens": 24}
                stream = await client.responses.create(stream=True, extra_body=body)
                reply = check_events([event.to_dict() async for event in stream])
                assert reply["usage"]["output_tokens"] <= 24
                assert reply["output"]
                assert reply["store"] is False
        await fleet.until_idle()


@pytest.mark.slow
async def test_a_stateless_client_gets_its_reasoning_back(
    tmp_path_factory: pytest.TempPathFactory,
):
    directory = tmp_path_factory.mktemp("reasoning")
    model = make_thinking_model(directory / "thinks")
    settings = SETTINGS | {"MODEL": str(model), "REASONING_KEY": "x" * 32}
    settings |= {"REASONING_PARSER": "qwen3", "TRUST_REQUEST_CHAT_TEMPLATE": "true"}
    async with running_fleet(directory, settings, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=1)
        async with client_of(fleet.of("gateway")[0].url) as client:
            fields: dict[str, Any] = {
                "input": "Hi",
                "store": False,
                "include": ["reasoning.encrypted_content"],
                "temperature": 1,
                "extra_body": {"thinking_token_budget": 5},
                "max_output_tokens": 12,
            }
            stream = await client.responses.create(model="thinks", stream=True, **fields)
            reply = check_events([event.to_dict() async for event in stream])
            reasoning = reply["output"][0]
            assert reasoning["type"] == "reasoning"
            assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
            sealed = reasoning | {"content": []}
            foreign = sealed | {"encrypted_content": "x"}
            num_plain, num_sealed, num_foreign = [
                (
                    await client.responses.input_tokens.count(
                        model="thinks",
                        input=[item, {"role": "assistant", "content": "Yes."}],
                        extra_body={"chat_template": TEMPLATE},
                    )
                ).input_tokens
                for item in (reasoning, sealed, foreign)
            ]
            assert num_plain == num_sealed > num_foreign
        await fleet.until_idle()
