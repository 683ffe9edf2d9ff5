"""instructor, in each of its modes that reach a server in another way."""

from enum import Enum

import instructor
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "Describe a fish."}]


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Fin(BaseModel):
    is_left: bool
    length: int


class Fish(BaseModel):
    colour: Colour
    fins: list[Fin]


def asked(mode: instructor.Mode) -> dict:
    return {
        "model": "shoal-tiny",
        "messages": MESSAGES,
        "max_tokens": 400,
        "max_retries": 3,
        "response_model": Fish,
        "temperature": 0.7,
    }


@pytest.mark.parametrize(
    "mode", [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]
)
def test_a_reply_becomes_an_object(url: str, mode: instructor.Mode):
    client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=mode)
    fish = client.chat.completions.create(**asked(mode))
    assert isinstance(fish, Fish)
    assert fish.colour in Colour


async def test_a_stream_becomes_an_object_bit_by_bit(url: str):
    mode = instructor.Mode.TOOLS
    client = instructor.from_openai(AsyncOpenAI(base_url=url, api_key="none"), mode=mode)
    parts = [part async for part in client.chat.completions.create_partial(**asked(mode))]
    assert parts[-1].colour in Colour
    assert len(parts) > 1
