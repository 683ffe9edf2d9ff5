"""Combinations of tools, reasoning, forms, logprobs, choices and streams: each is answered, and the
stream equals the whole reply; or it is refused by the name of a field."""

import asyncio
import itertools
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from benchmarks.harness.fleet import running_fleet
from tests.mesh.forks import fork
from tests.mesh.structured import client_of
from tests.mesh.thinking_model import make_thinking_model

SETTINGS = {
    "DTYPE": "float32",
    "MAX_MODEL_LEN": "512",
    "NUM_THREADS": "1",
    "REASONING_PARSER": "qwen3",
}
MESSAGES: Any = [{"role": "user", "content": "How is the weather in Rome?"}]
BUDGET = 4
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
NAMES = ("weather", "clock")


def tools_of(is_strict: bool) -> Any:
    schema = CITY | {"additionalProperties": False}
    functions = ({"name": name, "parameters": schema, "strict": is_strict} for name in NAMES)
    return [{"type": "function", "function": each} for each in functions]


LOOSE: Any = {"tools": tools_of(False)}
STRICT: Any = {"tools": tools_of(True)}
NAMED = {"type": "function", "function": {"name": "clock"}}
ALLOWED = {"mode": "required", "tools": [NAMED]}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY, "strict": True}}
AXES: dict[str, list[dict[str, Any]]] = {
    "tools": [
        {},
        LOOSE,
        STRICT,
        LOOSE | {"parallel_tool_calls": False},
        LOOSE | {"tool_choice": "none"},
        LOOSE | {"tool_choice": "required"},
        STRICT | {"tool_choice": "required", "parallel_tool_calls": False},
        LOOSE | {"tool_choice": NAMED},
        STRICT | {"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}},
    ],
    "reasoning": [
        {"thinking_token_budget": BUDGET},
        {},
        {"reasoning_effort": "none"},
        {"thinking_token_budget": BUDGET, "include_reasoning": False},
        {"thinking_token_budget": BUDGET, "separate_reasoning": False},
        {"thinking_token_budget": BUDGET, "reasoning_effort": "none"},
    ],
    "form": [
        {},
        {"response_format": {"type": "json_object"}},
        {"response_format": SCHEMA},
        {"structured_outputs": {"regex": "[a-f]{3,9}"}},
        {"structured_outputs": {"choice": ["fish", "no fish"]}, "response_format": SCHEMA},
    ],
    "logprobs": [
        {},
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": True, "logprob_token_ids": [7, 300]},
        {"return_token_ids": True},
    ],
    "n": [{}, {"n": 3}],
}
Row = tuple[int, ...]


def rows() -> list[Row]:
    """Any two values of two axes occur together in a row."""
    dice, sizes = random.Random(17), [len(values) for values in AXES.values()]
    axes = list(itertools.combinations(range(len(sizes)), 2))

    def pairs_of(row: Row) -> set[tuple[int, int, int, int]]:
        return {(one, row[one], other, row[other]) for one, other in axes}

    every = set().union(*map(pairs_of, itertools.product(*map(range, sizes))))
    chosen: list[Row] = []
    while every:
        one, value, other, second = min(every)
        tried = []
        for _ in range(40):
            row = [dice.randrange(size) for size in sizes]
            row[one], row[other] = value, second
            tried.append(tuple(row))
        chosen.append(max(tried, key=lambda row: len(pairs_of(row) & every)))
        every -= pairs_of(chosen[-1])
    return chosen


def fields_of(row: Row) -> dict[str, Any]:
    parts = (values[index] for values, index in zip(AXES.values(), row, strict=True))
    return {name: value for part in parts for name, value in part.items()}


async def answered(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> Any:
    """The choices and the usage, with a stream joined as by OpenAI's client; or the field named by
    the refusal."""
    body = {"temperature": 1, "seed": 3, "max_tokens": 60} | fields
    try:
        done = await client.chat.completions.create(
            model="fish", messages=MESSAGES, extra_body=body
        )
    except openai.BadRequestError as error:
        return error.param
    return done.model_dump(exclude_none=True, include={"choices", "usage"})


async def streamed(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> Any:
    interval = 1 + len(fields) % 3
    body = {"temperature": 1, "seed": 3, "max_tokens": 60, "stream_interval": interval} | fields
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    try:
        stream = await client.chat.completions.create(
            model="fish", messages=MESSAGES, extra_body=body, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
    except openai.BadRequestError as error:
        return error.param
    async for chunk in stream:
        usage = chunk.usage or usage
        for part in chunk.model_dump(exclude_none=True)["choices"]:
            add(choices.setdefault(part["index"], {"index": part["index"], "message": {}}), part)
    assert usage
    return {
        "choices": [choices[index] for index in sorted(choices)],
        "usage": usage.model_dump(exclude_none=True),
    }


def add(choice: dict[str, Any], part: dict[str, Any]) -> None:
    message = choice["message"]
    for name, value in part.pop("delta").items():
        if name == "tool_calls":
            for call in value:
                calls = message.setdefault("tool_calls", [])
                if call.pop("index") == len(calls):
                    calls.append(call)
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        elif name == "role" or value:
            message[name] = message.get(name, "") + value
    if "logprobs" in part:
        logprobs = choice.setdefault("logprobs", {"content": []})
        logprobs["content"] += part.pop("logprobs")["content"]
    choice["token_ids"] = choice.get("token_ids", []) + part.pop("token_ids", [])
    choice |= part


def comparable(reply: dict[str, Any]) -> list[Any]:
    """Without ids of calls, which are unique to each reply, and without drafts."""
    usage = reply["usage"]
    details = usage.get("completion_tokens_details", {})
    seen: list[Any] = [usage["completion_tokens"], details.get("reasoning_tokens")]
    for choice in reply["choices"]:
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls", [])]
        texts = [message.get(name) for name in ("content", "reasoning", "reasoning_content")]
        tokens = [choice.get("logprobs"), choice.get("token_ids") or None]
        seen += [choice["finish_reason"], calls, texts, tokens]
    return seen


def check(fields: dict[str, Any], reply: dict[str, Any]) -> None:
    choices, usage = reply["choices"], reply["usage"]
    assert len(choices) == fields.get("n", 1)
    numbers = [len(choice.get("token_ids") or ()) for choice in choices]
    if fields.get("logprobs"):
        numbers = [len(choice["logprobs"]["content"]) for choice in choices]
    if any(numbers):
        assert sum(numbers) == usage["completion_tokens"]
    choice_of_tools = fields.get("tool_choice", "auto" if "tools" in fields else "none")
    for choice in choices:
        message, reason = choice["message"], choice["finish_reason"]
        calls = message.get("tool_calls", [])
        assert reason in ("stop", "length", "tool_calls")
        assert not calls or choice_of_tools != "none"
        assert not calls or len(calls) == 1 or fields.get("parallel_tool_calls", True)
        for call in calls if reason != "length" else calls[:-1]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)
        if choice_of_tools not in ("auto", "none"):
            assert calls or reason == "length"
        elif reason == "stop" and not calls:
            check_form(fields, message.get("content", "").rpartition("</think>")[2].strip())
        if fields.get("reasoning_effort") == "none" or fields.get("include_reasoning") is False:
            assert not message.get("reasoning")
    if "thinking_token_budget" in fields and fields.get("separate_reasoning", True):
        reasoned = usage["completion_tokens_details"]["reasoning_tokens"]
        assert reasoned <= (BUDGET + 1) * len(choices), "a line's end before the marker"


def check_form(fields: dict[str, Any], text: str) -> None:
    if fields.get("response_format") == SCHEMA:
        jsonschema.validate(json.loads(text), CITY)
    elif "response_format" in fields:
        assert isinstance(json.loads(text), dict)
    elif "structured_outputs" in fields:
        assert 3 <= len(text) <= 9
        assert set(text) <= set("abcdef")


@pytest.mark.slow
async def test_any_two_features_go_together_or_are_refused_by_name(
    tmp_path: Path, subtests: pytest.Subtests
):
    model = make_thinking_model(tmp_path / "fish")
    async with running_fleet(tmp_path, SETTINGS | {"MODEL": str(model)}, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=1)
        async with client_of(fleet.of("gateway")[0].url) as client:
            turns = asyncio.Semaphore(8)

            async def both(fields: dict[str, Any]) -> tuple[Any, Any]:
                async with turns:
                    return await answered(client, fields), await streamed(client, fields)

            asked = [fields_of(row) for row in rows()]
            replies = await asyncio.gather(*map(both, asked))
        await fleet.until_idle()
    for fields, (whole, stream) in zip(asked, replies, strict=True):
        with subtests.test(fields=str(fields)):
            if isinstance(whole, str):
                assert stream == whole
                assert whole.partition(".")[0] in fields
            else:
                check(fields, whole)
                assert comparable(stream) == comparable(whole)
    refused = [reply for reply, _ in replies if isinstance(reply, str)]
    assert 0 < len(refused) < len(replies) // 2
