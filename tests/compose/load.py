"""Clients at work while a stack is changed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.harness.checked_load import Load

NUM_STREAMS = 12
NUM_TOKENS = 48


@asynccontextmanager
async def loaded(url: str, num_tokens: int = NUM_TOKENS) -> AsyncIterator[Load]:
    """Clients at work; every failure or different output is an error."""
    load = Load(NUM_STREAMS, num_tokens, lambda number: url)
    await load.learn()
    running = asyncio.create_task(load.run())
    try:
        yield load
        await progress(load)
    finally:
        load.is_over = True
        await running
    assert not load.failures, load.failures[:5]
    assert len(load.differences) <= max(1, load.num_good // 1000), load.differences


async def progress(load: Load) -> None:
    """Waits until every client has ended about one more request."""
    goal = load.num_good + NUM_STREAMS
    async with asyncio.timeout(120):
        while load.num_good < goal:
            assert not load.failures, load.failures[:5]
            await asyncio.sleep(0.05)
