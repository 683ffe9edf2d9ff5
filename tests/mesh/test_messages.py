"""Anthropic's messages by real processes: Claude Code's requests, tools, thinking."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest
import pytest_asyncio

from benchmarks.harness.fleet import Fleet, running_fleet
from tests.mesh.forks import fork
from tests.mesh.thinking_model import make_thinking_model
from tests.services.gateway.apis.messages.events import read_message

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS = {
    "DTYPE": "float32",
    "MAX_MODEL_LEN": "2048",
    "NUM_THREADS": "1",
    "REASONING_PARSER": "qwen3",
}
RECORDED = Path(__file__).parent / "recorded" / "claude-code.json"
PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
CONTEXT = 2048
SUM: dict[str, Any] = {
    "name": "multiply",
    "description": "Multiplies two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
QUESTION: dict[str, Any] = {"role": "user", "content": "What is 1234 * 56?"}
TALK: dict[str, Any] = {"role": "user", "content": "What does the scheduler do?"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Its model has markers of reasoning."""
    directory: Path = tmp_path_factory.mktemp("messages")
    model = make_thinking_model(directory / "shoal-tiny")
    async with running_fleet(directory, SETTINGS | {"MODEL": str(model)}, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=1)
        yield fleet
        await fleet.until_idle()


@pytest_asyncio.fixture(loop_scope="module")
async def http(fleet: Fleet) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(fleet.of("gateway")[0].url) as session:
        yield session


async def ask(http: aiohttp.ClientSession, path: str = PATH, **fields: Any) -> Any:
    """The reply; for a stream the client's final message, after a check of each event."""
    body = {"max_tokens": 64, "temperature": 0, "messages": [TALK]} | fields
    async with http.post(path, json=body) as response:
        text = await response.text()
    assert response.status == 200, text
    return read_message(text) if fields.get("stream") else json.loads(text)


def without_id(message: dict[str, Any]) -> dict[str, Any]:
    """The parts equal in each reply to a request; ids of calls are unique."""
    content = [block | {"id": ""} for block in message["content"]]
    usage = message["usage"]
    num_prompt = sum(num for name, num in usage.items() if name.endswith("input_tokens"))
    return message | {"id": "", "content": content, "usage": (num_prompt, usage["output_tokens"])}


async def test_requests_of_claude_code_are_answered(
    http: aiohttp.ClientSession, subtests: pytest.Subtests
):
    """A captured request with shortened texts and tools; ``written`` follows descriptions of
    interactive requests."""
    recorded = json.loads(RECORDED.read_text())

    async def answer(sent: dict[str, Any]) -> tuple[int, str]:
        data = json.dumps(sent["body"])
        async with http.post(sent["path"], data=data, headers=recorded["headers"]) as response:
            return response.status, await response.text()

    requests = [*recorded["requests"], *recorded["written"]]
    replies = await asyncio.gather(*map(answer, requests))
    for sent, (status, text) in zip(requests, replies, strict=True):
        body = sent["body"]
        with subtests.test(call=sent["call"]):
            assert status == sent["status"], text
            if sent["status"] != 200:
                error = json.loads(text)["error"]
                assert error["type"] == "invalid_request_error"
                assert "tools.0.type" in error["message"]
            elif "count_tokens" in sent["path"]:
                assert json.loads(text)["input_tokens"] > 0
            else:
                check(body, read_message(text) if body.get("stream") else json.loads(text))


def check(body: dict[str, Any], message: dict[str, Any]) -> None:
    reason = message["stop_reason"]
    if reason in ("end_turn", "tool_use") and (config := body.get("output_config") or {}):
        for block in message["content"] if "format" in config else ():
            jsonschema.validate(json.loads(block["text"]), config["format"]["schema"])
    if body["max_tokens"] > CONTEXT:
        assert reason != "max_tokens", "the context is full before"
    assert message["usage"]["output_tokens"] <= body["max_tokens"]


async def test_a_line_that_differs_in_each_request_costs_no_cache(http: aiohttp.ClientSession):
    body = json.loads(RECORDED.read_text())["requests"][0]["body"] | {"max_tokens": 1}
    usages = []
    for number in range(2):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}
        reply = await ask(http, **body | {"system": [billing, *body["system"][1:]]})
        usages.append(reply["usage"])
    first, second = usages
    assert second["cache_read_input_tokens"] > 512 > second["input_tokens"]
    num_prompts = {usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in usages}
    assert len(num_prompts) == 1
    assert first["input_tokens"] >= second["input_tokens"]


async def test_tokens_are_counted_as_they_are_used(http: aiohttp.ClientSession):
    for fields in (
        {"system": "Be kind.", "tools": [SUM], "messages": [QUESTION]},
        {"thinking": {"type": "adaptive"}},
        {"messages": [TALK, {"role": "assistant", "content": "The scheduler"}]},
    ):
        count = await ask(http, COUNT, **fields)
        usage = (await ask(http, **fields | {"max_tokens": 1}))["usage"]
        assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


async def test_a_message_of_no_tokens_fills_the_cache(http: aiohttp.ClientSession):
    fields: Any = {"system": "Fish swim in the pond, and the pond is deep. " * 20}
    empty = await ask(http, **fields, max_tokens=0)
    assert (empty["content"], empty["stop_reason"]) == ([], "max_tokens")
    assert empty["usage"]["output_tokens"] == 0
    assert (await ask(http, **fields))["usage"]["cache_read_input_tokens"] > 64


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "multiply"},
    ],
)
async def test_a_tool_is_used_and_its_result_is_answered(
    http: aiohttp.ClientSession, choice: dict[str, Any]
):
    asked: Any = {"messages": [QUESTION], "tools": [SUM], "tool_choice": choice}
    whole = await ask(http, **asked)
    stream = await ask(http, **asked, stream=True)
    assert without_id(stream) == without_id(whole)
    assert whole["stop_reason"] == "tool_use"
    (use,) = whole["content"]
    jsonschema.validate(use["input"], SUM["input_schema"])
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "69104"}
    turns = [
        QUESTION,
        {"role": "assistant", "content": whole["content"]},
        {"role": "user", "content": [result]},
    ]
    answer = await ask(http, messages=turns, tools=[SUM], stream=True)
    assert answer["content"]


async def test_thinking_is_a_block_that_may_come_back(http: aiohttp.ClientSession):
    """The model never ends it by itself, only by its budget."""
    asked: Any = {"thinking": {"type": "enabled", "budget_tokens": 8}}
    whole = await ask(http, **asked)
    assert without_id(await ask(http, **asked, stream=True)) == without_id(whole)
    thought, *_ = whole["content"]
    assert thought["type"] == "thinking"
    assert thought["thinking"]
    num_thought = whole["usage"]["output_tokens_details"]["thinking_tokens"]
    assert num_thought in (8, 9), "a line's end before the marker"
    shown = {"thinking": asked["thinking"] | {"display": "omitted"}}
    omitted, *_ = (await ask(http, **shown))["content"]
    assert omitted["thinking"] == ""
    for block in (thought, omitted):
        said = {"role": "assistant", "content": [block, {"type": "text", "text": "So."}]}
        turns = [TALK, said, TALK]
        async with http.post(PATH, json={"max_tokens": 1, "messages": turns}) as response:
            assert response.status == 200
            assert "X-Shoal-Warnings" not in response.headers


async def test_without_thinking_the_answer_comes_first(http: aiohttp.ClientSession):
    (block,) = (await ask(http))["content"]
    assert block["type"] == "text"


async def test_a_prefilled_message_is_continued(http: aiohttp.ClientSession):
    whole = (await ask(http))["content"][0]["text"]
    begin, rest = whole[: len(whole) // 2], whole[len(whole) // 2 :]
    turns = [TALK, {"role": "assistant", "content": begin}]
    (block,) = (await ask(http, messages=turns))["content"]
    assert block["text"]
    assert not block["text"].startswith(begin)
    assert rest


async def test_a_stop_sequence_is_named(http: aiohttp.ClientSession):
    text = (await ask(http))["content"][0]["text"]
    word = text.split()[3]
    for stream in (False, True):
        reply = await ask(http, stop_sequences=["\0", word], stream=stream)
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", word)
        assert "".join(block["text"] for block in reply["content"]) == text[: text.index(word)]


async def test_a_prompt_that_is_too_long_is_refused_in_the_words_clients_look_for(
    http: aiohttp.ClientSession,
):
    turns = [{"role": "user", "content": "fish " * 3000}]
    async with http.post(PATH, json={"max_tokens": 9, "messages": turns}) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: ")
