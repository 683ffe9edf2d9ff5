"""One request's mailbox, without a mesh."""

import asyncio

import pytest

from services.gateway.exchange import Exchange, Progress
from shared.errors import Unavailable
from shared.messages import Finished

FINISHED = Finished("a/0", 1, "stop", 3, 4)


async def test_what_came_while_the_reader_was_away_is_one_progress() -> None:
    exchange = Exchange()
    for text in "abc":
        exchange.add(text, 1)
    assert await anext(exchange) == Progress("abc", 3, None)
    exchange.add("d", 2)
    exchange.finish(FINISHED)
    assert [progress async for progress in exchange] == [Progress("d", 2, FINISHED)]


async def test_pending_text_is_read_before_the_error_is_raised() -> None:
    exchange = Exchange()
    exchange.add("a", 1)
    exchange.fail(Unavailable("gone"))
    assert (await anext(exchange)).text == "a"
    with pytest.raises(Unavailable, match="gone"):
        await anext(exchange)


async def test_a_reader_that_waits_is_woken_by_an_error() -> None:
    exchange = Exchange()
    reading = asyncio.ensure_future(anext(exchange))
    await asyncio.sleep(0)
    exchange.fail(Unavailable("gone"))
    with pytest.raises(Unavailable):
        await reading


async def test_a_token_without_text_is_progress() -> None:
    exchange = Exchange()
    exchange.add("", 1)
    assert await anext(exchange) == Progress("", 1, None)


async def test_a_refused_request_is_not_accepted() -> None:
    exchange = Exchange()
    exchange.fail(Unavailable("full"))
    with pytest.raises(Unavailable):
        await exchange.accepted()
