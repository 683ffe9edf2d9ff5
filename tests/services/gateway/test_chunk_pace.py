"""The number of tokens in a stream's chunks, and that none is lost."""

import asyncio
import json
from typing import Any

import aiohttp
import numpy as np
import pytest

from services.gateway.chat.open_generation import ChunkPace
from services.gateway.mesh.output_collector import ChoiceUpdate
from shared.wire.messages import Finished, TokenRun
from shared.wire.token_arrays import TokenArrays
from tests.services.gateway.fakes import FakeTokenizer


def update(token_id: int, text: str, index: int = 0, *, ends: bool = False) -> ChoiceUpdate:
    arrays = TokenArrays(np.array([token_id], np.int32))
    finished = Finished("a~b/0", 1, index, "stop", 1) if ends else None
    return ChoiceUpdate(index, text, TokenRun(1), arrays, finished)


def sent(pace: ChunkPace, updates: list[ChoiceUpdate]) -> list[str]:
    return [due.text for each in updates if (due := pace.push(each)) is not None]


def test_chunks_have_so_many_tokens_but_for_the_first_and_the_last() -> None:
    updates = [update(number, letter) for number, letter in enumerate("abcdefgh")]
    last = update(8, "i", ends=True)
    assert sent(ChunkPace(3), [*updates, last]) == ["a", "bcd", "efg", "hi"]
    assert sent(ChunkPace(1), updates) == list("abcdefgh")
    assert sent(ChunkPace(100), [*updates, last]) == ["a", "bcdefghi"]


def test_the_first_text_is_not_held_though_tokens_came_before_it() -> None:
    updates = [update(0, ""), update(1, "a"), update(2, "b"), update(3, "c")]
    assert sent(ChunkPace(2), updates) == ["", "a", "bc"]


def test_choices_are_held_each_by_itself_and_the_rest_is_there() -> None:
    pace = ChunkPace(3)
    updates = [update(number // 2, letter, number % 2) for number, letter in enumerate("aAbBcCdD")]
    assert sent(pace, updates[:-1]) == ["a", "A", "bcd"]
    assert [(each.index, each.text, each.arrays.ids.tolist()) for each in pace.rest()] == [
        (1, "BC", [1, 2])
    ]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_stream_has_a_chunk_for_each_interval_and_all_of_the_text(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, fails: bool
) -> None:
    """Held tokens are sent before an error, too."""
    asked = {"prompt": "a", "stream": True, "stream_interval": 3, "return_token_ids": True}
    posting = asyncio.create_task(http.post("/v1/completions", json=asked).__aenter__())
    request = await tokenizer.accepted()
    for letter in "abcdefgh":
        request.text(letter)
        await asyncio.sleep(0.02)  # so that each arrives by itself
    if fails:
        request.fail(500, "broke", "it broke")
    else:
        request.finish()
    events = (await (await posting).text()).split("\n\n")
    chunks: list[Any] = [json.loads(event[6:]) for event in events[:-2]]
    choices = [chunk["choices"][0] for chunk in chunks if "choices" in chunk]
    assert [choice["text"] for choice in choices] == ["a", "bcd", "efg", "h"]
    assert [len(choice["token_ids"]) for choice in choices] == [1, 3, 3, 1]
    assert ("error" in chunks[-1]) == fails
