"""Slots shared fairly between owners."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """Gives a free slot to the owner with the fewest slots, ties to the owner with the oldest last
    slot. ``most`` is the limit of one owner."""

    def __init__(self, num: int, most: int | None = None) -> None:
        self._num_free = num
        self._most = num if most is None else most
        self._held: Counter[str] = Counter()
        self._num_given = 0
        self._last: dict[str, int] = {}  # the number of an owner's last slot
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def hold(self, owner: str) -> AsyncIterator[None]:
        await self.take(owner)
        try:
            yield
        finally:
            self.give_back(owner)

    async def take(self, owner: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back(owner)
            raise

    def give_back(self, owner: str) -> None:
        self._num_free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._hand_out()

    def _hand_out(self) -> None:
        while self._num_free and (owners := self._entitled()):
            owner = min(owners, key=lambda each: (self._held[each], self._last.get(each, 0)))
            turn = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if not turn.cancelled():
                self._num_free -= 1
                self._num_given += 1
                self._held[owner] += 1
                self._last[owner] = self._num_given
                turn.set_result(None)

    def _entitled(self) -> list[str]:
        return [owner for owner in self._waiting if self._held[owner] < self._most]
