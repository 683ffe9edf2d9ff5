"""A long text delays neither the event loop nor the texts of others."""

import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from services.tokenizer.lanes import LONG_BYTES, Lanes
from services.tokenizer.prepare import convert
from services.tokenizer.requests import Requests
from services.tokenizer.text_model import TextModel
from shared.errors import InvalidRequest
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import Convert, Converted, Failed
from tests.services.tokenizer.one_scheduler import OneScheduler
from tests.services.tokenizer.test_deliver import FakePeer

TICK_S = 0.001
TO_TEXT = Convert("c", "ids", False, to="text")
MEGABYTE = ("The shoal turns as one 👋 and no fish gives the order. \n" * 18_000)[:1_000_000]


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel(EMBEDDED_MODEL, 1 << 20, 8192)


@pytest.fixture(scope="module")
def raw() -> Tokenizer:
    return Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))


async def ticks_during(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of ``work`` on a thread; the rate of a timer on the loop meanwhile, per second."""
    num = 0

    async def tick() -> None:
        nonlocal num
        while True:
            await asyncio.sleep(TICK_S)
            num += 1

    timer = asyncio.create_task(tick())
    started_s = time.monotonic()
    result = await asyncio.to_thread(work)
    timer.cancel()
    return result, num / (time.monotonic() - started_s)


@pytest.mark.seconds
async def test_the_loop_runs_while_a_megabyte_is_encoded_and_decoded(
    model: TextModel, raw: Tokenizer
):
    ids, ticks = await ticks_during(lambda: model.encode(MEGABYTE))
    direct, direct_ticks = await ticks_during(lambda: raw.encode(MEGABYTE))
    assert ids.tolist() == direct.ids
    assert ticks > 10 * direct_ticks
    text, ticks = await ticks_during(lambda: convert(model, TO_TEXT, ids))
    direct, direct_ticks = await ticks_during(lambda: raw.decode(direct.ids))
    assert text.tobytes().decode() == direct == MEGABYTE
    assert ticks > 5 * direct_ticks


@pytest.mark.seconds
async def test_the_loop_runs_while_a_megabyte_of_a_chat_is_rendered(model: TextModel):
    messages = [{"role": "user", "content": MEGABYTE[:1000]}] * 1000
    chat = np.frombuffer(json.dumps(messages).encode(), np.uint8)
    _, ticks = await ticks_during(lambda: convert(model, Convert("c", "chat", False), chat))
    rendered = model.render(messages)
    _, direct_ticks = await ticks_during(lambda: raw_encode(model, rendered))
    assert ticks > 10 * direct_ticks


def raw_encode(model: TextModel, text: str) -> Any:
    return model._tokenizer.encode(text)


async def test_long_texts_hold_up_no_short_one():
    """Their thread hangs until the short ones are done."""
    lanes, short_is_done, began = Lanes(2), asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def wait(number: int) -> None:
        began.append(number)
        asyncio.run_coroutine_threadsafe(short_is_done.wait(), loop).result()

    longs = [asyncio.create_task(lanes.run("", LONG_BYTES, partial(wait, n))) for n in range(3)]
    await asyncio.sleep(0)
    assert await lanes.run("", LONG_BYTES - 1, lambda: "short") == "short"
    longs[1].cancel()
    short_is_done.set()
    await asyncio.gather(*longs, return_exceptions=True)
    assert began == [0, 2]  # the cancelled ones never began


async def test_a_cancelled_long_text_keeps_its_thread_until_it_ends_it():
    lanes, go_on = Lanes(1), asyncio.Event()
    loop, running, most = asyncio.get_running_loop(), [], []

    def work() -> None:
        running.append(1)
        most.append(len(running))
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        running.pop()

    first = asyncio.create_task(lanes.run("", 0, work))
    while not running:
        await asyncio.sleep(0.001)
    first.cancel()
    second = asyncio.create_task(lanes.run("", 0, work))
    for _ in range(10):
        await asyncio.sleep(0.001)
    assert not lanes._short.threads._work_queue.qsize()
    go_on.set()
    await second
    assert most == [1, 1]


@pytest.mark.parametrize("num_bytes", [0, LONG_BYTES])
async def test_texts_of_one_owner_hold_up_none_of_another(num_bytes: int):
    """Its threads hang until the other's text is done."""
    lanes, other_is_done = Lanes(2), asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        asyncio.run_coroutine_threadsafe(other_is_done.wait(), loop).result()

    many = [asyncio.create_task(lanes.run("many", num_bytes, wait)) for _ in range(10)]
    await asyncio.sleep(0)
    assert await lanes.run("one", num_bytes, lambda: "done") == "done"
    other_is_done.set()
    await asyncio.gather(*many)


async def test_a_text_too_long_for_any_tokenization_is_refused_at_once():
    model, gateway = TextModel(EMBEDDED_MODEL, 10, 8192), FakePeer()
    data = np.zeros(4 * model.max_chars + 4, np.uint8)
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(model, None, 10, Lanes(1), tasks, OneScheduler(None))
        requests.convert(gateway, Convert("c", "text", True), data)
        (failed,) = gateway.sent
        assert isinstance(failed, Failed)
        assert (failed.code, len(requests)) == ("context_length_exceeded", 0)
        requests.convert(gateway, Convert("c", "ids", True, to="text"), np.zeros(10, np.int32))
        assert len(requests) == 1
    assert isinstance(gateway.sent[-1][0], Converted)
    with pytest.raises(InvalidRequest, match="prompt has 11,"):
        model.check_size("ids", np.zeros(11, np.int32))
