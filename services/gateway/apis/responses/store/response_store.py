"""Stored responses, off the event loop."""

import fcntl
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Raw

from services.gateway.apis.responses.store.database import (
    Entry,
    ResponseDatabase,
    StoreFull,
    StoreLimits,
)
from services.gateway.apis.responses.store.endings import Failure, ended
from services.gateway.http.fair_time import on_thread
from services.gateway.http.log_limit import LogLimit
from services.gateway.http.violations import show
from shared.errors import ConfigError, InvalidRequest, NotFound, StoreFailed
from shared.settings.gateway import GatewayConfig

log = logging.getLogger(__name__)
log.addFilter(LogLimit())
TOKEN_BYTES = 8
MAX_RESPONSES = 100_000
Result = TypeVar("Result")
LOST = Failure("gateway_lost", "the gateway that made this response in the background has ended")


class RunnerLock:
    """A file next to the store, ``token`` in its name, locked until ``close`` or the end of our
    process. Raises OSError if it cannot be made."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self.token = secrets.token_hex(TOKEN_BYTES)
        self._descriptor = os.open(
            self._path(self.token), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def is_alive(self, token: str) -> bool:
        """Whether its process holds the lock; the file of a dead process is removed."""
        if token == self.token:
            return True
        path = self._path(token)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        path.unlink(missing_ok=True)
        return False

    def close(self) -> None:
        self._path(self.token).unlink(missing_ok=True)
        os.close(self._descriptor)

    def _path(self, token: str) -> Path:
        return self._store.with_name(f"{self._store.name}.{token}.lock")


class ResponseStore:
    """A response belongs to the API key that made it: other keys do not find it. Methods raise
    StoreFailed if the file cannot be read or written, for example on a full disk."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError. Without ``response-store``, or with no bytes for it, no response can
        be stored."""
        self._limits = StoreLimits(
            config.response_store_bytes,
            MAX_RESPONSES,
            config.response_store_age_s,
        )
        self._max_conversation_bytes = config.max_body_bytes
        path = config.response_store if config.response_store_bytes else None
        self._database = ResponseDatabase(path, self._limits) if path is not None else None
        self._lock = _lock(path) if path is not None else None
        self._thread = ThreadPoolExecutor(1, "store")
        if self._database is not None and self._lock is not None:
            _end_lost(self._database, self._lock)

    @property
    def is_there(self) -> bool:
        return self._database is not None

    @property
    def runner(self) -> str:
        """This gateway's name as a maker of background responses; empty without a lock."""
        return self._lock.token if self._lock is not None else ""

    async def save(self, entry: Entry) -> None:
        self._check_size(entry)
        await self._run(lambda database: database.save(entry, time.time()))

    async def finish(self, entry: Entry) -> None:
        """Saves the end of a background response, unless it is deleted or has ended."""
        self._check_size(entry)
        await self._run(lambda database: database.finish(replace(entry, runner=None), time.time()))

    async def end(self, entry: Entry, status: str, error: Failure | None = None) -> None:
        """Ends a response that is made no further."""
        await self.finish(replace(entry, response=ended(entry.response, status, error)))

    async def update(self, response_id: str, response: bytes) -> None:
        """Stores the state so far of a response that is made in the background."""
        await self._run(lambda database: database.update(response_id, response))

    async def cancel(self, response_id: str) -> None:
        """Removes the response from its maker's ``wanted`` ones."""
        await self._run(lambda database: database.cancel(response_id))

    async def wanted(self) -> set[str]:
        """Our own responses that are neither cancelled nor deleted."""
        return await self._run(lambda database: database.wanted(self.runner))

    async def get(self, response_id: str, owner: str) -> Entry:
        """A response fails if its gateway ended while making it. Raises NotFound."""
        entry = await self._get(response_id, owner)
        if entry.runner is None or self._lock is None or self._lock.is_alive(entry.runner):
            return entry
        await self.end(entry, "failed", LOST)
        return await self._get(response_id, owner)

    def _check_size(self, entry: Entry) -> None:
        if entry.num_bytes > self._limits.max_bytes:
            raise StoreFailed(
                f"the response and its input have {entry.num_bytes} bytes; the limit is"
                f" response-store-bytes = {self._limits.max_bytes}",
                param="store",
            )

    async def _get(self, response_id: str, owner: str) -> Entry:
        entry = await self._run(lambda database: database.get(response_id, owner, time.time()))
        if entry is None:
            raise missing(response_id)
        return entry

    async def delete(self, response_id: str, owner: str) -> None:
        """Raises NotFound."""
        if not await self._run(lambda database: database.delete(response_id, owner)):
            raise missing(response_id)

    async def conversation(self, response_id: str, owner: str) -> list[bytes]:
        """The items of the response and of all responses before it, the first one first. Raises
        InvalidRequest."""
        limit, param = self._max_conversation_bytes, "previous_response_id"
        found = await self._run(
            lambda database: database.conversation(response_id, owner, limit, time.time())
        )
        if found == "":
            text = f"{param}: the conversation has more bytes than the limit, {limit}"
            raise InvalidRequest(f"{text} (max-body-bytes)", param=param)
        if isinstance(found, str):
            raise InvalidRequest(
                f"{param}: there is no response {show(found)} here",
                param=param,
                code="previous_response_not_found",
            )
        if found[-1].runner and (await self.get(response_id, owner)).runner:
            raise InvalidRequest(
                f"{param}: response {show(response_id)} has not ended",
                param=param,
                code="response_not_ended",
            )
        return await self._run(lambda _: [item for entry in found for item in items_of(entry)])

    async def items(self, item_ids: Collection[str], owner: str) -> dict[str, bytes]:
        """The items in the output of a stored response. Raises InvalidRequest."""
        limit = self._max_conversation_bytes
        found = await self._run(lambda database: _items(database, item_ids, owner, limit))
        if isinstance(found, int):
            raise InvalidRequest(
                f"input: the responses of its item_references have {found} bytes; the limit is"
                f" max-body-bytes = {limit}",
                param="input",
            )
        return found

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._lock is not None:
            self._lock.close()
        if self._database is not None:
            self._database.close()

    async def _run(self, call: Callable[[ResponseDatabase], Result]) -> Result:
        database = self._database
        if database is None:
            raise NotFound("no response is kept here: there is no response-store")
        try:
            return await on_thread(self._thread, call, database)
        except StoreFull:
            limits = self._limits
            raise StoreFailed(
                "no room for the response: responses in the making and equal parts of other API"
                f" keys fill the store; the limits are response-store-bytes = {limits.max_bytes}"
                f" and {limits.max_entries} responses",
                param="store",
            ) from None
        except sqlite3.Error as error:
            log.error("response-store: %s", error)
            raise StoreFailed(f"response-store: {error}", param="store") from None


def _items(
    database: ResponseDatabase, item_ids: Collection[str], owner: str, max_bytes: int
) -> dict[str, bytes] | int:
    """The items, or the bytes of their responses if these are too many."""
    responses = database.outputs_with(item_ids, owner, max_bytes, time.time())
    if isinstance(responses, int):
        return responses
    found: dict[str, bytes] = {}
    for response in responses:
        items = output_items(response)
        found |= {item_id: items[item_id] for item_id in items.keys() & set(item_ids)}
    return found


def _end_lost(database: ResponseDatabase, lock: RunnerLock) -> None:
    """Ends responses of ended gateways as failed; they then count as removable again."""
    now_s = time.time()
    for runner in database.runners():
        if lock.is_alive(runner):
            continue
        for entry in database.made_by(runner, now_s):
            try:
                failed = ended(entry.response, "failed", LOST)
                database.finish(replace(entry, response=failed, runner=None), now_s)
            except (StoreFull, sqlite3.Error) as error:
                log.error("response-store: %s: %s", entry.id, error)


def _lock(store: Path) -> RunnerLock:
    """Raises ConfigError."""
    try:
        return RunnerLock(store)
    except OSError as error:
        raise ConfigError(f"response-store: {store}: no lock beside it: {error.strerror}") from None


def missing(response_id: str) -> NotFound:
    return NotFound(f"there is no response {show(response_id)} here", param="response_id")


class _Outputs(msgspec.Struct):
    output: list[Raw]


class _Id(msgspec.Struct):
    id: str


def items_of(entry: Entry) -> list[bytes]:
    """The JSON of each item, of the input and then of the output."""
    of_input = msgspec.json.decode(entry.input, type=list[Raw])
    of_output = msgspec.json.decode(entry.response, type=_Outputs).output
    return [bytes(item) for item in (*of_input, *of_output)]


def output_items(response: bytes) -> dict[str, bytes]:
    """The JSON of each item of a response's output by its id."""
    items = msgspec.json.decode(response, type=_Outputs).output
    return {msgspec.json.decode(item, type=_Id).id: bytes(item) for item in items}
