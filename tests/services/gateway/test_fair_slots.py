"""Slots and threads shared between owners in turn."""

import asyncio
import threading

import pytest

from services.gateway.http.fair_time import FairThreads
from shared.process.fair_slots import FairSlots


class Holders:
    """Tasks that hold a slot until released; ``order`` names their owners in order of
    acquisition."""

    def __init__(self, num_slots: int, most: int | None = None) -> None:
        self.order: list[str] = []
        self._slots = FairSlots(num_slots, most)
        self._ends: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, owners: str) -> None:
        self.tasks += [asyncio.create_task(self._hold(owner)) for owner in owners]
        await asyncio.sleep(0.01)

    async def _hold(self, owner: str) -> None:
        async with self._slots.hold(owner):
            self.order.append(owner)
            self._ends.append(end := asyncio.Event())
            await end.wait()

    async def let_go(self, number: int) -> None:
        self._ends[number].set()
        await asyncio.sleep(0.01)

    async def let_all_go(self) -> None:
        for number in range(len(self.tasks)):
            if number < len(self._ends):
                await self.let_go(number)


async def test_a_free_slot_goes_to_the_owner_with_the_fewest():
    holders = Holders(3)
    await holders.ask("aaaaaa")
    await holders.ask("bbc")
    await holders.let_all_go()
    assert holders.order == [*"aaabcabaa"]


async def test_equal_owners_take_turns():
    holders = Holders(1)
    await holders.ask("aaabbbcc")
    await holders.let_all_go()
    assert holders.order == [*"abcabcab"]


async def test_an_owner_leaves_slots_beyond_its_most_to_others():
    holders = Holders(3, most=2)
    await holders.ask("aaa")
    await holders.ask("b")
    assert holders.order == [*"aab"]
    await holders.let_all_go()
    assert holders.order == [*"aaba"]


@pytest.mark.parametrize("is_granted", [False, True])
async def test_a_cancelled_owner_keeps_no_slot(is_granted: bool):
    slots = FairSlots(1)

    async def hold() -> None:
        async with slots.hold("b"):
            pytest.fail("it was cancelled")

    async with slots.hold("a"):
        waiting = asyncio.create_task(hold())
        await asyncio.sleep(0.01)
        if not is_granted:
            waiting.cancel()
            await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(5), slots.hold("c"):
        pass


async def test_calls_that_block_are_made_in_turn():
    threads = FairThreads(1, "test")
    end, order = threading.Event(), list[str]()
    first = asyncio.create_task(threads.run("a", end.wait))
    await asyncio.sleep(0.01)
    others = [asyncio.create_task(threads.run(owner, order.append, owner)) for owner in "aab"]
    await asyncio.sleep(0.01)
    end.set()
    await asyncio.gather(first, *others)
    assert order == ["b", "a", "a"]
    threads.close()
