"""Images and videos that are not in the request: of a URL, and uploaded ones."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from yarl import URL

from services.gateway.http.admission import Reservation
from services.gateway.media.fetch import Fetcher, NotFetched, Room
from services.gateway.mesh.job import Attachment, Prompt
from shared.errors import RETRY_AFTER_S, InvalidRequest, Unavailable
from shared.wire.codec import Array

Find = Callable[[str, str], Awaitable[Path | None]]
NO_BYTES = np.zeros(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Elsewhere(Attachment):
    """A file without its bytes: of a URL, or uploaded with the id ``source``. ``shown`` begins its
    errors."""

    source: URL | str
    shown: str


class Loader:
    """The limit of the files of a request is the one of a body with them, ``max_bytes``."""

    def __init__(self, fetcher: Fetcher, max_bytes: int, timeout_s: float) -> None:
        self._fetcher = fetcher
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def loaded(
        self, prompts: list[Prompt], owner: str, reservation: Reservation, find: Find | None
    ) -> list[Prompt]:
        """The same source is read once. Raises InvalidRequest, Overloaded, and Unavailable after
        the timeout."""
        media = [each for prompt in prompts for each in prompt.media]
        wanted = [each for each in media if isinstance(each, Elsewhere)]
        if not wanted:
            return prompts
        room, nums = Room(self._max_bytes, reservation), Counter(each.source for each in wanted)
        firsts = {each.source: each for each in reversed(wanted)}
        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as tasks:
                loading = {
                    source: tasks.create_task(self._file(each, owner, room, find))
                    for source, each in firsts.items()
                }
        except TimeoutError:
            text = f"files not loaded within {self._timeout_s:g} s (accept-timeout-s)"
            raise Unavailable(text, retry_after_s=RETRY_AFTER_S) from None
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        files = {source: each.result() for source, each in loading.items()}
        reservation.hold(sum(file.nbytes * (nums[each] - 1) for each, file in files.items()))

        def whole(each: Attachment) -> Attachment:
            if not isinstance(each, Elsewhere):
                return each
            return Attachment(each.medium, files[each.source])

        return [replace(prompt, media=[*map(whole, prompt.media)]) for prompt in prompts]

    async def _file(self, wanted: Elsewhere, owner: str, room: Room, find: Find | None) -> Array:
        source, medium = wanted.source, wanted.medium
        try:
            data: bytes | bytearray
            if isinstance(source, URL):
                data = await self._fetcher.fetch(source, medium.kind, owner, room)
            else:
                data = await _uploaded(source, owner, room, find)
            if not data:
                raise NotFetched("", "it has no data")
        except NotFetched as error:
            text = f"{medium.param} is {wanted.shown}; {error}"
            raise InvalidRequest(text, param=medium.param) from None
        return np.frombuffer(data, np.uint8)


async def _uploaded(file_id: str, owner: str, room: Room, find: Find | None) -> bytes:
    if find is None:
        raise NotFetched("", "no files are kept (batch-dir)")
    path = await find(file_id, owner)
    if path is None:
        raise NotFetched("", "no file of purpose vision has this id")
    try:
        room.take((await asyncio.to_thread(path.stat)).st_size)
        return await asyncio.to_thread(path.read_bytes)
    except FileNotFoundError:
        raise NotFetched("", "no file of purpose vision has this id") from None
