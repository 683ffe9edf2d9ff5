"""Chats with models of several formats, through a gateway with OpenAI's own client."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shared.wire.messages import Delta, Deltas, Mark, OutputStart, TokenRun
from shared.wire.token_arrays import TokenArrays
from tests.services.gateway.asking import CALLER, MESSAGES
from tests.services.gateway.client import serving
from tests.services.gateway.fakes import FakeTokenizer, Submitted, fake_tokenizer
from tests.services.gateway.marked import accept
from tests.services.gateway.openai_client import client_of
from tests.services.gateway.text.call_texts import GOOD
from tests.services.gateway.text.replies import FUNCTIONS, markers_of, marks_of, rules

PLAIN = 20  # the id of a token that is no marker
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in FUNCTIONS.items()
]
FORMATS = (
    "deepseek_v32",
    "deepseek_v4",
    "dots",
    "gemma4",
    "hy_v3",
    "inkling",
    "internlm",
    "kimi_k3",
    "minimax_m3",
    "muse_glimmer",
    "nemotron_json",
    "openai",
)


def pieces_of(text: str, markers: list[str]) -> Iterator[tuple[str, str]]:
    """Parts of ``text`` and the marker that each is, if any."""
    end = 0
    for mark in marks_of(text, markers):
        yield from ((char, "") for char in text[end : mark.position])
        end = mark.position + mark.num_chars
        yield mark.text, mark.text
    yield from ((char, "") for char in text[end:])


def say(request: Submitted, text: str, markers: list[str]) -> None:
    position = 0
    for number, (piece, marker) in enumerate(pieces_of(text, markers)):
        token_id = CALLER.vocab_size - 1 - markers.index(marker) if marker else PLAIN
        marks = [Mark(position, len(piece), number, token_id)] if marker else []
        row = Delta(*request.key, 0, number, TokenRun(1), piece, marks=marks)
        request.peer.send(Deltas([row], []), *TokenArrays(np.array([token_id], np.int32)))
        request.num_sent[0] = number + 1
        position += len(piece)


async def answer(tokenizer: FakeTokenizer, text: str, markers: list[str]) -> None:
    for _ in range(2):
        request = await tokenizer.submitted.get()
        accept(request, OutputStart.UNDECIDED)
        say(request, text, markers)
        request.finish()


@pytest.mark.parametrize("name", FORMATS)
async def test_a_reply_and_a_stream_have_the_calls_of_the_format(tmp_path: Path, name: str):
    text, parts = next((text, parts) for each, text, parts in GOOD if each == name)
    markers = sorted(markers_of(rules(name)))
    model = msgspec.structs.replace(CALLER, tool_parser=name, reasoning_parser="")
    asked: Any = {"model": "fish", "messages": MESSAGES, "tools": TOOLS}
    async with fake_tokenizer(tmp_path, model=model) as tokenizer:
        for index, marker in enumerate(markers):
            tokenizer.vocabulary[model.vocab_size - 1 - index] = marker.encode()
        async with serving(tmp_path) as gateway, client_of(gateway) as client:
            answering = asyncio.create_task(answer(tokenizer, text, markers))
            (whole,) = (await client.chat.completions.create(**asked)).choices
            async with client.chat.completions.stream(**asked) as stream:
                async for _ in stream:
                    pass
                (streamed,) = (await stream.get_final_completion()).choices
            await answering
    expected = [tuple(part) for part in parts if part[0] == "call"]
    for choice in (whole, streamed):
        calls: Any = choice.message.tool_calls
        assert [("call", each.function.name, each.function.arguments) for each in calls] == expected
        assert choice.finish_reason == "tool_calls"
