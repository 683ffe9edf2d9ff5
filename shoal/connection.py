"""A server, and the thread with the event loop that talks to it: callers may have a loop of their
own."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, NamedTuple

import aiohttp
import msgspec

from cli.session import session_with
from shared.client.sender import PASSING, Reply, Sender
from shared.errors import ShoalError, text_of_fault

MAX_OPEN_REQUESTS = 256
RETRY_S = 300.0  # a mesh restarts its services meanwhile

log = logging.getLogger(__name__)

Opening = AbstractAsyncContextManager[aiohttp.ClientSession]
encode = msgspec.json.Encoder().encode


class Model(msgspec.Struct):
    owned_by: str


class Models(msgspec.Struct):
    """A reply of ``/v1/models``."""

    data: list[Model]


class Request(NamedTuple):
    """``name`` is the name of its prompt in errors."""

    url: str
    body: dict[str, Any]
    name: str


class Connection:
    """Opens a session with the server and keeps it until ``close``. Raises the error of the
    opening."""

    def __init__(self, opening: Opening) -> None:
        self._process_id = os.getpid()
        self._submitting = threading.Lock()
        self._session: Future[aiohttp.ClientSession] = Future()
        self._loop = asyncio.new_event_loop()
        self._main = self._loop.create_task(self._hold(opening))
        self._thread = threading.Thread(target=self._run, name="shoal", daemon=True)
        self._thread.start()
        try:
            self._session.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends requests, the session and, if there is one, the mesh. May be called twice, by the
        garbage collection of any thread, and in forks of the process, which own nothing of it."""
        if self._process_id != os.getpid() or not self._thread.is_alive():
            return
        with suppress(RuntimeError):  # the loop has just ended by itself
            self._loop.call_soon_threadsafe(self._main.cancel)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def ask(self, requests: Sequence[Request], on_reply: Callable[[], object]) -> list[bytes]:
        """The bodies of the replies, in the order of the requests; a bounded number is open at
        once. Raises ValueError for a refused request, RuntimeError for any other failure; both end
        the remaining requests."""
        with self._submitting:
            if not self._thread.is_alive() or self._main.done():
                raise RuntimeError("the LLM is closed")
            answers = asyncio.run_coroutine_threadsafe(self._ask(requests, on_reply), self._loop)
        try:
            return answers.result()
        except CancelledError:
            raise RuntimeError("the LLM was closed") from None
        except BaseException:
            answers.cancel()
            raise

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        with self._submitting:  # the last calls become tasks
            self._loop.run_until_complete(asyncio.sleep(0))
        if rest := asyncio.all_tasks(self._loop):
            for task in rest:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(rest))
        self._loop.close()

    async def _hold(self, opening: Opening) -> None:
        try:
            async with opening as session:
                self._session.set_result(session)
                await asyncio.Event().wait()
        except (Exception, asyncio.CancelledError) as error:
            if not self._session.done():
                self._session.set_exception(first_leaf(error))
            elif isinstance(error, Exception):
                log.error("the mesh ended: %s", first_leaf(error))

    async def _ask(
        self, requests: Sequence[Request], on_reply: Callable[[], object]
    ) -> list[bytes]:
        sender = Sender(self._session.result(), RETRY_S, timeout_s=None)
        replies = [b""] * len(requests)
        unsent = iter(enumerate(requests))

        async def answer_some() -> None:
            for index, request in unsent:
                reply = await sender.send(request.url, encode(request.body))
                replies[index] = _checked(reply, request)
                on_reply()

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(len(requests), MAX_OPEN_REQUESTS)):
                    tasks.create_task(answer_some())
        except ExceptionGroup as errors:
            if self._session.result().closed:  # before these requests were told to end
                raise asyncio.CancelledError from None
            error = first_leaf(errors)
            raise (RuntimeError(str(error)) if isinstance(error, ShoalError) else error) from None
        return replies


def first_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _checked(reply: Reply, request: Request) -> bytes:
    """Raises ValueError for a fault of the request, RuntimeError for one of the server."""
    if reply.status == 200:
        return reply.body
    error = msgspec.json.decode(reply.body)
    found = error.get("error", error) if isinstance(error, dict) else error
    message = found.get("message", found) if isinstance(found, dict) else found
    is_fault_of_request = reply.status < 500 and reply.status not in PASSING
    kind: type[Exception] = ValueError if is_fault_of_request else RuntimeError
    raise kind(f"{request.name}: {message}")


@asynccontextmanager
async def running_server(url: str, api_key: str | None) -> AsyncIterator[aiohttp.ClientSession]:
    """A session with a server. Raises ConnectionError if it does not answer as Shoal does."""
    async with session_with(url, api_key) as session:
        try:
            async with session.get("/v1/models") as response:
                body = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionError(f"url: {url} does not answer: {text_of_fault(error)}") from None
        if response.status != 200:
            text = body.decode(errors="replace")
            raise ConnectionError(f"url: {url} answers {response.status}: {text}")
        if not _are_of_shoal(body):
            raise ConnectionError(f"url: {url} is a server of another kind; expected Shoal")
        yield session


def _are_of_shoal(models: bytes) -> bool:
    try:
        found = msgspec.json.decode(models, type=Models).data
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return any(each.owned_by == "shoal" for each in found)
