"""Responses made in the background: their clients have already got an answer."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec

from services.gateway.apis.responses.replies.objects import ResponseObject
from services.gateway.apis.responses.store.database import Entry
from services.gateway.apis.responses.store.endings import Failure
from services.gateway.apis.responses.store.response_store import ResponseStore
from services.gateway.http.internal_socket import OWNER_HEADER, RESPONSE_HEADER
from services.gateway.http.json_reply import encode
from services.gateway.http.log_limit import LogLimit
from services.gateway.http.request_id import HEADER as REQUEST_ID
from shared.client.sender import BatchStopped, NoReply, Sender
from shared.errors import Overloaded, StoreFailed

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

LOOK_S = 0.25
"""The interval of the check for cancelled or deleted responses, possibly by another gateway."""
RETRY_S = 3600.0
"""The longest wait after a temporary refusal, for example at a limit of the key."""
PAUSE_S = 10.0
"""The pause after an end that could not be written, before the next try."""
ROUTE = "/v1/responses"
BROKEN = "the response broke inside the server"


class _Body(msgspec.Struct):
    error: Failure


class _Head(msgspec.Struct):
    created_at: int


class Background:
    """Sends each background request once more to the gateway itself, on its ``socket``: so it is
    admitted, limited, logged and made like any other. An owner has up to ``max_open`` of them with
    up to ``max_bytes`` of bodies. ``making`` gives the response of an id so far, ``abort`` ends it;
    both know only responses with a request that has come back here."""

    def __init__(
        self,
        store: ResponseStore,
        socket: Path,
        max_open: int,
        max_bytes: int,
        making: Callable[[str], ResponseObject | None],
        abort: Callable[[str], bool],
    ) -> None:
        self._store = store
        self._socket = socket
        self._places = FairRoom(max_open)
        self._bytes = FairRoom(max_bytes)
        self._making = making
        self._abort = abort
        self._entries: dict[str, Entry] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_begun: set[str] = set()
        self._session: aiohttp.ClientSession | None = None
        self._looking: asyncio.Task[None] | None = None

    def check_room(self, owner: str, num_bytes: int) -> None:
        """Raises Overloaded if ``owner`` may have no more responses, or none with a body of
        ``num_bytes``."""
        if not self._places.has_room(owner, 1):
            raise Overloaded(
                f"{self._places.held(owner)} responses are made in the background, of all clients"
                f" {self._places.total}; the limit is max-background-responses ="
                f" {self._places.part}, less while other API keys hold many"
            )
        if not self._bytes.has_room(owner, num_bytes):
            raise Overloaded(
                f"requests in the background hold {self._bytes.held(owner)} bytes, of all clients"
                f" {self._bytes.total}, and this one needs {num_bytes} more; the limit is"
                f" max-body-bytes = {self._bytes.part}, less while other API keys hold many"
            )

    async def start(self, entry: Entry, request_id: str, body: bytes) -> None:
        """``entry`` is the queued response. Raises StoreFailed."""
        self._places.add(entry.owner, 1)
        self._bytes.add(entry.owner, len(body))
        self._entries[entry.id] = entry
        try:
            await self._store.save(replace(entry, runner=self._store.runner))
        except BaseException:
            self._forget(entry, body)
            raise
        self._tasks[entry.id] = asyncio.create_task(self._make(entry, request_id, body))
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())

    def created_s(self, response_id: str) -> int | None:
        """The time it was queued; None if it is no longer ours."""
        entry = self._entries.get(response_id)
        return msgspec.json.decode(entry.response, type=_Head).created_at if entry else None

    async def close(self) -> None:
        """Unfinished responses count as failed from here on."""
        tasks = [*self._tasks.values(), *([self._looking] if self._looking is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._session is not None:
            await self._session.close()

    async def _make(self, entry: Entry, request_id: str, body: bytes) -> None:
        try:
            error = await self._error(entry, request_id, body)
            if error is not None:
                await self._fail(entry, error)
        except Exception:
            log.exception("response %s broke in the background", entry.id)
            await self._fail(entry, Failure("server_error", BROKEN))
        finally:
            self._is_begun.discard(entry.id)
            del self._tasks[entry.id]
            self._forget(entry, body)

    async def _fail(self, entry: Entry, error: Failure) -> None:
        """Writes the failure as soon as there is room for it."""
        while True:
            try:
                await self._store.end(entry, "failed", error)
                return
            except StoreFailed:
                await asyncio.sleep(PAUSE_S)
            except Exception:
                log.exception("the end of response %s could not be written", entry.id)
                return

    def _forget(self, entry: Entry, body: bytes) -> None:
        self._places.add(entry.owner, -1)
        self._bytes.add(entry.owner, -len(body))
        del self._entries[entry.id]

    async def _error(self, entry: Entry, request_id: str, body: bytes) -> Failure | None:
        """None if the response was made and stored."""
        headers = {OWNER_HEADER: entry.owner, RESPONSE_HEADER: entry.id, REQUEST_ID: request_id}
        try:
            reply = await Sender(self._own_session(), RETRY_S, None, headers).send(ROUTE, body)
        except (BatchStopped, NoReply) as error:
            return Failure("server_error", str(error))
        return msgspec.json.decode(reply.body, type=_Body).error if reply.status >= 300 else None

    async def _look(self) -> None:
        """Runs while there are background responses."""
        while self._tasks:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look_once()
            except StoreFailed:
                continue
            except Exception:
                log.exception("responses in the background could not be compared with the store")

    async def _look_once(self) -> None:
        known = [*self._tasks]
        wanted = await self._store.wanted()
        for response_id in known:
            if response_id in wanted:
                await self._note_begin(response_id)
            elif response_id in self._tasks:
                await self._end(response_id)

    async def _end(self, response_id: str) -> None:
        """Cancels the response; one that is still queued leaves the queue."""
        if not self._abort(response_id):
            task = self._tasks[response_id]
            await self._store.end(self._entries[response_id], "cancelled")
            task.cancel()

    async def _note_begin(self, response_id: str) -> None:
        """Saves the begun response for clients of other gateways."""
        response = self._making(response_id)
        if response is not None and response_id not in self._is_begun:
            await self._store.update(response_id, encode(response))
            self._is_begun.add(response_id)

    def _own_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.UnixConnector(str(self._socket), limit=0)
            headers = {"Content-Type": "application/json"}
            self._session = aiohttp.ClientSession(
                "http://own", connector=connector, headers=headers
            )
        return self._session


class FairRoom:
    """One owner has up to ``part``, and all together twice as much. An owner never gets more than
    was free, so that others find room."""

    def __init__(self, part: int) -> None:
        self.part = part
        self._held: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._held.total()

    def held(self, owner: str) -> int:
        return self._held[owner]

    def has_room(self, owner: str, num: int) -> bool:
        return self._held[owner] + num <= min(self.part, 2 * self.part - self.total)

    def add(self, owner: str, num: int) -> None:
        """A negative number subtracts."""
        self._held[owner] += num
        if not self._held[owner]:
            del self._held[owner]
