"""instructor, in each mode with its own kind of request."""

from typing import Annotated, Literal

import instructor
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

MESSAGES = [{"role": "user", "content": "Describe a fish."}]


class Fin(BaseModel):
    is_left: bool
    length: Annotated[int, Field(ge=0, le=99)]


class Fish(BaseModel):
    colour: Literal["red", "blue"]
    fins: Annotated[list[Fin], Field(max_length=3)]


ASKED = {
    "model": "shoal-tiny",
    "messages": MESSAGES,
    "max_tokens": 400,
    "max_retries": 0,
    "response_model": Fish,
    "seed": 1,
}


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_a_reply_becomes_an_object(url: str, mode: instructor.Mode):
    client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=mode)
    fish = client.chat.completions.create(**ASKED)
    assert isinstance(fish, Fish)
    assert fish.colour in ("red", "blue")


async def test_a_stream_becomes_an_object_bit_by_bit(url: str):
    mode = instructor.Mode.TOOLS
    client = instructor.from_openai(AsyncOpenAI(base_url=url, api_key="none"), mode=mode)
    parts = [part async for part in client.chat.completions.create_partial(**ASKED)]
    assert parts[-1].colour in ("red", "blue")
    assert len(parts) > 1
