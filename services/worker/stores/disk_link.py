"""The store on a disk as schedulers see it."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from msgspec.structs import replace

from services.worker.step_thread import call_soon, raise_soon
from services.worker.stores.disk import Contents, Disk, Spilling
from services.worker.stores.folder import Header
from services.worker.stores.part import Row
from shared.errors import CodecError
from shared.link.peer import Peer
from shared.wire.messages import (
    DISK_STORES_MINOR,
    FIRST_STATE,
    MAX_DISK_BYTES,
    Fetch,
    Fetched,
    Forget,
    Inventory,
    Load,
    Spill,
    Spilled,
    Unfetch,
)

LOOK_S = 1.0


class DiskLink:
    """Tells ``home``, the scheduler of the worker, of copies that are done. The number of places
    under way is limited, since they take memory: ones that are fetched and not loaded yet, and ones
    that are being spilled."""

    def __init__(
        self, disk: Disk, home: Callable[[], Peer | None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._disk, self._home = disk, home
        self._most = max(1, MAX_DISK_BYTES // min(each.place_bytes for each in disk.header.parts))
        self._senders: deque[tuple[Peer | None, int]] = deque()  # of plans that spill
        self._epoch = 0  # of slots
        self._num_fetched = self._num_spilling = 0
        disk.start(partial(call_soon, loop), partial(raise_soon, loop))

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._disk.look(time.monotonic())

    def greet(self, home: Peer) -> None:
        """After all copies for a former scheduler; never if the disk does not answer."""
        if home.hello.minor >= DISK_STORES_MINOR:
            self._disk.list_full(partial(self._send_inventory, home, self._epoch))

    def check(self, row: Row) -> None:
        """Raises CodecError."""
        match row:
            case Spill(place_on_disk=place):
                check_place(self._disk.header, place)
                self._num_spilling += 1
            case Forget(place=place, is_on_disk=True):
                check_place(self._disk.header, place)
            case Fetch():
                self._num_fetched += 1
            case Unfetch() | Load(is_fetched=True):
                self._num_fetched -= 1
        if not 0 <= self._num_fetched <= self._most or self._num_spilling > self._most:
            raise CodecError(
                f"{self._num_fetched} places fetched and {self._num_spilling} spilled at once;"
                f" {self._most} is the limit"
            )

    def begin(self, step: int, rows: Sequence[Row]) -> None:
        """Reads wait for no step; writes follow the rows before them."""
        if any(isinstance(row, Spill) for row in rows):
            self._senders.append((self._home(), self._epoch))
        for row in rows:
            if isinstance(row, Unfetch):
                self._disk.take(row.key)
        if places := [row.place for row in rows if isinstance(row, Forget) and row.is_on_disk]:
            self._disk.forget(places)
        if fetches := [row for row in rows if isinstance(row, Fetch)]:
            self._disk.fetch(step, fetches, partial(self._send_fetched, self._home(), self._epoch))

    def spill(self, step: int, copies: list[Spilling]) -> None:
        """Called for each plan that spills."""
        sender, epoch = self._senders.popleft()
        self._disk.spill(step, copies, partial(self._send_spilled, sender, epoch, len(copies)))

    def clear(self) -> None:
        self._epoch += 1
        self._num_fetched = self._num_spilling = 0
        self._disk.clear()

    def _send_inventory(
        self, home: Peer, epoch: int, found: tuple[np.ndarray, np.ndarray] | None
    ) -> None:
        if found is not None and self._is_current(home, epoch):
            message = inventory_message(self._disk.header, self._disk.location)
            home.send(replace(message, is_on_disk=True), *found)

    def _send_fetched(self, home: Peer | None, epoch: int, found: tuple[Fetched, Contents]) -> None:
        message, contents = found
        if home is not None and self._is_current(home, epoch):
            self._num_fetched -= len(message.lost)
            self._disk.hold(contents)
            home.send(message)

    def _send_spilled(self, home: Peer | None, epoch: int, num: int, message: Spilled) -> None:
        if home is not None and self._is_current(home, epoch):
            self._num_spilling -= num
            home.send(message)

    def _is_current(self, home: Peer, epoch: int) -> bool:
        return self._home() is home and epoch == self._epoch


def inventory_message(header: Header, location: str) -> Inventory:
    sizes = header.num_places, header.place_bytes, header.num_states, header.state_bytes
    return Inventory(header.id, location, *sizes)


def check_place(header: Header, place: int) -> None:
    """Raises CodecError for one that the store has not."""
    is_state = place >= FIRST_STATE
    end = FIRST_STATE + header.num_states if is_state else header.num_places
    if place >= end:
        raise CodecError(
            f"place {place} of a store with {header.num_places} blocks and"
            f" {header.num_states} states"
        )


def is_of_disk(row: Row) -> bool:
    match row:
        case Spill() | Fetch() | Unfetch() | Forget(is_on_disk=True) | Load(is_fetched=True):
            return True
    return False
