"""Seeded pairs of a schema and a request for it, and clients that validate the output."""

import asyncio
import json
import random
from typing import Any

import jsonschema
from openai import AsyncOpenAI

COLOURS = ["red", "green", "blue", "dark grey"]
MAX_TOKENS = 96


def client_of(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def schema_of(dice: random.Random, depth: int = 2) -> dict[str, Any]:
    """An object with values of all simple kinds, lists, and objects down to ``depth``."""
    kinds = ["string", "short", "integer", "number", "boolean", "enum", "list"]
    names = [f"{dice.choice('abcdef')}_{index}" for index in range(dice.randint(1, 4))]
    properties = {}
    for name in names:
        kind = dice.choice([*kinds, "object"] if depth else kinds)
        properties[name] = schema_of(dice, depth - 1) if kind == "object" else _value(kind)
    required = [name for name in names if dice.random() < 0.8]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _value(kind: str) -> dict[str, Any]:
    match kind:
        case "short":
            return {"type": "string", "maxLength": 8}
        case "enum":
            return {"enum": COLOURS}
        case "list":
            return {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}
        case _:
            return {"type": kind}


def request_of(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema and the arguments of a chat completion constrained by it."""
    dice = random.Random(seed)
    schema = schema_of(dice)
    return schema, {
        "model": "shoal-tiny",
        "messages": [{"role": "user", "content": f"Describe fish number {seed}."}],
        "temperature": 1,
        "seed": seed,
        "max_tokens": MAX_TOKENS,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "fish", "schema": schema, "strict": True},
        },
    }


async def text_of(client: AsyncOpenAI, request: dict[str, Any]) -> tuple[str, str]:
    """The text and the finish reason of a stream."""
    text, reason = "", ""
    async for chunk in await client.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason


async def texts_of(client: AsyncOpenAI, seeds: range, at_once: int) -> list[tuple[str, str]]:
    gate = asyncio.Semaphore(at_once)

    async def one(seed: int) -> tuple[str, str]:
        async with gate:
            return await text_of(client, request_of(seed)[1])

    return await asyncio.gather(*map(one, seeds))


def check(schema: dict[str, Any], text: str, reason: str) -> bool:
    """True if the text is complete; then it must be valid. Otherwise it was cut at its last
    token."""
    if reason == "length":
        return False
    assert reason == "stop", (reason, text)
    jsonschema.validate(json.loads(text), schema)
    return True
