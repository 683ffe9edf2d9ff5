"""Logprobs as JSON, against dictionaries built the slow way."""

import asyncio
import json
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.chat.replies.logprob_json import ChatLogprobs, TextLogprobs
from services.gateway.http.pieces import JSON_CHUNK_BYTES, PieceMaker
from services.gateway.mesh.output_collector import ChoiceUpdate
from services.gateway.mesh.token_table import TokenTable
from shared.wire.messages import MIN_LOGPROB, TokenRun
from shared.wire.token_arrays import TokenArrays
from tests.services.gateway.fakes import vocabulary

EURO = [1, 2]  # its bytes in two tokens


def table(size: int) -> TokenTable:
    words = vocabulary(size)
    return TokenTable(
        np.frombuffer(b"".join(words), np.uint8), np.array(list(map(len, words)), np.int32)
    )


def update(
    ids: list[int], values: Any, top_ids: Any = None, ranks: list[int] | None = None
) -> ChoiceUpdate:
    """``values`` [n, num_values], ``top_ids`` [n, num_top_ids]."""
    values = np.array(values, np.float32)
    top = np.zeros((len(ids), 0), np.int32) if top_ids is None else np.array(top_ids, np.int32)
    arrays = TokenArrays(
        np.array(ids, np.int32),
        values.ravel(),
        top.ravel(),
        np.array(ranks or [1] * len(ids), np.int32),
    )
    run = TokenRun(len(ids), values.shape[1], top.shape[1])
    return ChoiceUpdate(0, "", run, arrays, finished=None)


def chat(*updates: ChoiceUpdate, size: int = 100, by_id: bool = False) -> Any:
    writer = ChatLogprobs(table(size).spelling(by_id))
    return json.loads(b"".join(writer.write(updates)))


def text(*updates: ChoiceUpdate, size: int = 100, by_id: bool = False) -> Any:
    writer = TextLogprobs(table(size).spelling(by_id))
    return json.loads(b"".join(writer.write(updates)))


def test_each_token_of_a_chat_has_logprob_bytes_rank_and_the_likeliest() -> None:
    got = update([6, 0], [[-0.5, -0.25, -0.5], [-3, -1, -2]], [[7, 6], [8, 9]], [2, 5])
    assert chat(got) == {
        "content": [
            {
                "token": " w6",
                "bytes": list(b" w6"),
                "logprob": -0.5,
                "rank": 2,
                "top_logprobs": [
                    {"token": " w7", "bytes": list(b" w7"), "logprob": -0.25},
                    {"token": " w6", "bytes": list(b" w6"), "logprob": -0.5},
                ],
            },
            {
                "token": '"',
                "bytes": list(b'"'),
                "logprob": -3,
                "rank": 5,
                "top_logprobs": [
                    {"token": " w8", "bytes": list(b" w8"), "logprob": -1},
                    {"token": " w9", "bytes": list(b" w9"), "logprob": -2},
                ],
            },
        ],
        "refusal": None,
    }


def test_a_completion_has_columns_and_its_own_token_among_the_likeliest_in_any_case() -> None:
    got = update([6, 0], [[-0.5, -0.25, -0.5], [-3, -1, -2]], [[7, 6], [8, 9]])
    assert text(got) == {
        "text_offset": [0, 3],
        "token_logprobs": [-0.5, -3],
        "tokens": [" w6", '"'],
        "top_logprobs": [{" w7": -0.25, " w6": -0.5}, {" w8": -1, " w9": -2, '"': -3}],
    }


def test_without_alternatives_there_is_the_token_alone() -> None:
    got = update([6], [[-0.5]])
    assert chat(got)["content"][0]["top_logprobs"] == []
    assert text(got)["top_logprobs"] == [{" w6": -0.5}]


def test_an_update_without_tokens_is_empty() -> None:
    assert chat(update([], np.zeros((0, 1)))) == {"content": [], "refusal": None}
    assert text() == {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def test_half_a_character_is_replaced_in_text_and_exact_in_bytes() -> None:
    got = update([*EURO, 6], [[-1], [-1], [-1]])
    assert [entry["bytes"] for entry in chat(got)["content"]] == [[0xE2, 0x82], [0xAC], [*b" w6"]]
    assert text(got)["tokens"] == ["bytes:\\xe2\\x82", "bytes:\\xac", " w6"]
    assert text(got)["text_offset"] == [0, 0, 1]


def test_offsets_go_on_from_chunk_to_chunk() -> None:
    writer = TextLogprobs(table(100).spelling(by_id=False))
    offsets = [
        json.loads(b"".join(writer.write([update(ids, [[-1]] * len(ids))])))["text_offset"]
        for ids in ([6, 7], EURO[:1], EURO[1:], [8])
    ]
    assert offsets == [[0, 3], [6], [6], [7]]


def test_tokens_can_be_named_by_their_ids() -> None:
    got = update([6], [[-0.5, -0.25]], [[7]])
    [entry] = chat(got, by_id=True)["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:6", list(b" w6"))
    assert entry["top_logprobs"][0]["token"] == "token_id:7"
    assert text(got, by_id=True)["top_logprobs"] == [{"token_id:7": -0.25, "token_id:6": -0.5}]


def test_of_tokens_that_are_written_alike_the_likeliest_is_written() -> None:
    got = update([4], [[-4, -1, -2]], [[5, 6]])
    written = b"".join(TextLogprobs(table(100).spelling(by_id=False)).write([got])).decode()
    assert json.loads(written)["top_logprobs"] == [{"": -1, " w6": -2}]
    assert written.count('"":') == 1


def test_the_whole_vocabulary_comes_likeliest_first_and_of_equals_the_lowest_id() -> None:
    values = np.full(100, -np.inf, np.float32)
    values[[50, 60, 70]] = [-2, -1, -2]
    got = update([60], [[-1, *values]])
    top = chat(got)["content"][0]["top_logprobs"]
    assert [entry["token"] for entry in top[:4]] == [" w60", " w50", " w70", '"']
    assert len(top) == 100
    assert {entry["logprob"] for entry in top[3:]} == {MIN_LOGPROB}


@given(st.lists(st.floats(-9999, 0, width=32), min_size=1, max_size=5))
def test_numbers_have_the_shortest_digits_that_give_the_same_float32(values: list[float]) -> None:
    got = update([6], [values], [range(len(values) - 1)])
    written = b"".join(ChatLogprobs(table(100).spelling(by_id=False)).write([got]))
    numbers = [part.split(b"}")[0].split(b",")[0] for part in written.split(b'"logprob":')[1:]]
    assert [float(np.float32(float(number))) for number in numbers] == values
    for number in numbers:
        digits = Decimal(number.decode()).normalize().as_tuple().digits
        assert len(digits) <= 9, number
    json.loads(written)


@pytest.mark.parametrize("kind", [ChatLogprobs, TextLogprobs])
async def test_a_large_vocabulary_is_written_equally_on_the_thread(kind: Any) -> None:
    size, num_tokens = 20_000, 3
    random = np.random.default_rng(0)
    values = -random.exponential(9, (num_tokens, size + 1)).astype(np.float32)
    got = update([7, 8, 9], values)
    spelling = table(size).spelling(by_id=False)
    at_once = b"".join(kind(spelling).write([got]))
    pieces: list[bytes] = []

    async def write(piece: bytes) -> None:
        pieces.append(piece)

    maker = PieceMaker()
    await maker.send(kind(spelling).write([got]), write)
    maker.close()
    assert b"".join(pieces) == at_once
    assert len(pieces) > 10
    assert max(map(len, pieces)) < 128 << 10
    alternatives = json.loads(at_once)
    if kind is ChatLogprobs:
        top = alternatives["content"][2]["top_logprobs"]
        assert [np.float32(entry["logprob"]) for entry in top] == sorted(values[2, 1:])[::-1]
    else:
        top = alternatives["top_logprobs"][2]
        assert np.float32(top[" w19999"]) == values[2, 1:][19999]
        assert len(top) == size - 1  # two have no bytes at all


async def test_other_work_goes_on_between_the_pieces() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    seen: list[int] = []

    async def write(piece: bytes) -> None:
        seen.append(turns)

    counting = asyncio.create_task(count())
    maker = PieceMaker()
    await maker.send(iter([b"x" * JSON_CHUNK_BYTES] * 5), write)
    maker.close()
    counting.cancel()
    assert len(set(seen)) == 5
