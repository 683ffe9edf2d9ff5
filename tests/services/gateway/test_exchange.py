"""One request's mailbox, without a mesh."""

import asyncio

import numpy as np
import pytest

from services.gateway.exchange import Exchange, merged
from shared.errors import Unavailable
from shared.messages import Delta, Finished
from shared.token_arrays import TokenArrays


def add(exchange: Exchange, index: int, position: int, text: str, *ids: int) -> None:
    row = Delta("a~b/0", 1, index, position, len(ids), text)
    exchange.add(index, row, TokenArrays(np.array(ids, np.int32)))


async def test_what_came_while_the_reader_was_away_is_one_progress() -> None:
    exchange = Exchange(1, 1)
    for position, text in enumerate("abc"):
        add(exchange, 0, position, text, position)
    update = await anext(exchange)
    assert (update.text, update.arrays.ids.tolist(), update.finished) == (
        "abc",
        [0, 1, 2],
        None,
    )
    add(exchange, 0, 3, "d", 3, 4)
    finished = Finished("a~b/0", 1, 0, "stop", 5)
    exchange.finish(0, finished)
    [last] = [update async for update in exchange]
    assert (last.text, last.num_tokens, last.finished) == ("d", 2, finished)


async def test_each_choice_has_its_own_progress_and_the_last_end_is_the_end() -> None:
    exchange = Exchange(1, 2)
    add(exchange, 1, 0, "b", 1)
    add(exchange, 0, 0, "a", 2)
    exchange.finish(1, Finished("a~b/0", 1, 1, "stop", 1))
    first, second = await anext(exchange), await anext(exchange)
    assert [(each.index, each.text) for each in (first, second)] == [(1, "b"), (0, "a")]
    exchange.finish(0, Finished("a~b/0", 1, 0, "length", 1))
    assert [update.index async for update in exchange] == [0]


async def test_pending_text_is_read_before_the_error_is_raised() -> None:
    exchange = Exchange(1, 1)
    add(exchange, 0, 0, "a", 1)
    exchange.fail(Unavailable("gone"))
    assert (await anext(exchange)).text == "a"
    with pytest.raises(Unavailable, match="gone"):
        await anext(exchange)


async def test_a_reader_that_waits_is_woken_by_an_error() -> None:
    exchange = Exchange(1, 1)
    reading = asyncio.ensure_future(anext(exchange))
    await asyncio.sleep(0)
    exchange.fail(Unavailable("gone"))
    with pytest.raises(Unavailable):
        await reading


async def test_a_token_without_text_is_progress() -> None:
    exchange = Exchange(1, 1)
    add(exchange, 0, 0, "", 7)
    update = await anext(exchange)
    assert (update.text, update.num_tokens) == ("", 1)


async def test_a_refused_request_is_not_accepted() -> None:
    exchange = Exchange(2, 1)
    exchange.accept(0, np.array([1, 2], np.int32))
    exchange.fail(Unavailable("full"))
    with pytest.raises(Unavailable):
        await exchange.accepted()


async def test_prompt_tokens_count_once_for_each_prompt() -> None:
    exchange = Exchange(2, 3)
    exchange.accept(1, np.array([1, 2], np.int32))
    exchange.accept(0, np.array([3], np.int32))
    await exchange.accepted()
    assert exchange.num_prompt_tokens == 3


def send_heartbeat(exchange: Exchange, index: int, position: int, *ids: int) -> None:
    row = Delta("a~b/0", 1, index, position, len(ids), "", of_prompt=True)
    exchange.add(index, row, TokenArrays(np.array(ids, np.int32)))


async def test_a_text_waits_until_all_of_its_prompt_is_told() -> None:
    exchange = Exchange(2, 2, has_prompt_logprobs=True)
    for prompt in range(2):
        exchange.accept(prompt, np.array([1, 2, 3], np.int32))
    add(exchange, 1, 0, "b", 9)
    add(exchange, 3, 0, "d", 9)
    send_heartbeat(exchange, 0, 0, 2)
    first = await anext(exchange)
    assert (first.of_prompt, first.index, first.arrays.ids.tolist()) == (True, 0, [2])
    waiting = asyncio.ensure_future(anext(exchange))
    await asyncio.sleep(0)
    assert not waiting.done()
    send_heartbeat(exchange, 2, 0, 2, 3)
    second = await waiting
    assert (second.of_prompt, second.index, second.arrays.ids.tolist()) == (True, 2, [2, 3])
    assert (await anext(exchange)).index == 3
    send_heartbeat(exchange, 0, 1, 3)
    assert (await anext(exchange)).of_prompt
    assert (await anext(exchange)).index == 1


async def test_nobody_waits_for_a_prompt_of_one_token_nor_for_one_that_was_aborted() -> None:
    exchange = Exchange(2, 2, has_prompt_logprobs=True)
    exchange.accept(0, np.array([1], np.int32))
    add(exchange, 1, 0, "b", 9)
    assert (await anext(exchange)).index == 1
    exchange.accept(1, np.array([1, 2, 3], np.int32))
    add(exchange, 3, 0, "d", 9)
    exchange.finish(2, Finished("a~b/1", 1, 0, "abort", 0))
    assert {(await anext(exchange)).index, (await anext(exchange)).index} == {2, 3}


def verify(exchange: Exchange, position: int, drafts: list[int], num_accepted: int) -> None:
    """A token more than were accepted, with the drafts beside."""
    name = ("a~b/0", 1, 0, position)
    numbers = np.array(drafts, np.int32)
    values = numbers.astype(np.float32)
    exchange.add(
        0,
        Delta(*name, len(drafts), "", 1, of_drafts=True, num_accepted=num_accepted),
        TokenArrays(numbers, values, numbers[:0], numbers),
    )
    num = num_accepted + 1
    row = Delta(*name, num, "x", num_drafts=len(drafts), num_accepted=num_accepted)
    exchange.add(0, row, TokenArrays(np.arange(num, dtype=np.int32)))


async def test_drafts_of_several_steps_are_one_beside_their_tokens() -> None:
    exchange = Exchange(1, 1)
    verify(exchange, 0, [7, 8, 9], 2)
    verify(exchange, 3, [5], 0)
    update = await anext(exchange)
    assert update.arrays.ids.tolist() == [0, 1, 2, 0]
    assert (update.num_values, update.num_drafts, update.num_accepted) == (0, 4, 2)
    assert update.drafts.arrays.ids.tolist() == [7, 8, 9, 5]
    assert update.drafts.positions.tolist() == [0, 1, 2, 3]
    assert update.drafts.are_accepted.tolist() == [True, True, False, False]
    verify(exchange, 4, [6], 1)
    both = merged([update, await anext(exchange)])
    assert both.drafts.positions.tolist() == [0, 1, 2, 3, 4]
    assert (both.num_tokens, both.num_drafts, both.num_accepted) == (6, 5, 3)
