"""Sends requests over HTTP and records their outcomes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import aiohttp
import msgspec

from cli.bench.arrivals import Times
from cli.bench.row import Row
from cli.bench.settings import Settings
from cli.bench.stream import Stream, StreamError, message_of_body
from cli.bench.workload import Request
from cli.session import KEEPALIVE_S
from shared.errors import ConfigError, text_of_fault

CONNECT_TIMEOUT_S = 30.0
MAX_CLOSED = 32  # kept connections a request may find closed before it counts as failed
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
NOT_A_REPLY = (aiohttp.ClientError, TimeoutError, OSError)

Send = Callable[[Request, float], Coroutine[Any, Any, Row]]


class ModelCard(msgspec.Struct):
    id: str


class ModelList(msgspec.Struct):
    data: list[ModelCard]


class Client:
    def __init__(self, session: aiohttp.ClientSession, settings: Settings) -> None:
        self._session = session
        self._settings = settings
        self._where = settings.url + PATHS[settings.endpoint]

    async def model(self) -> str:
        """The first model listed by the server. Raises ConfigError."""
        where = f"{self._settings.url}/v1/models"
        try:
            async with self._session.get(where) as response:
                body = await response.read()
            if response.status != 200:
                raise StreamError(f"{response.status}: {message_of_body(body)}")
            return msgspec.json.decode(body, type=ModelList).data[0].id
        except NOT_A_REPLY as error:
            raise ConfigError(f"--url: {where} does not answer: {text_of_fault(error)}") from None
        except (StreamError, msgspec.MsgspecError, IndexError) as error:
            raise ConfigError(f"--model: {where} lists no model: {error}") from None

    async def send(self, request: Request, due_s: float) -> Row:
        stream, status, error = Stream(), 0, ""
        started_s = perf_counter()
        try:
            async with await self._post(request.body) as response:
                status = response.status
                if status != 200:
                    raise StreamError(message_of_body(await response.read()))
                async for data in response.content.iter_any():
                    stream.feed(data, perf_counter())
            stream.end()
        except StreamError as caught:
            error = f"{status}: {caught}"
        except NOT_A_REPLY as caught:
            error = text_of_fault(caught)
        return Row.of(stream, request.max_tokens, due_s, started_s, perf_counter(), error)

    async def _post(self, body: bytes) -> aiohttp.ClientResponse:
        """Retries if the server closed the kept connection before it answered or before the request
        was fully sent: a server may close idle connections at any time, which is no failure of a
        request. Each retry uses up one kept connection."""
        for _ in range(MAX_CLOSED):
            try:
                return await self._session.post(self._where, data=body)
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                continue
        return await self._session.post(self._where, data=body)


@asynccontextmanager
async def client(settings: Settings) -> AsyncIterator[Client]:
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if settings.api_key:
        headers["Authorization"] = f"Bearer {settings.api_key}"
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=settings.timeout
    )
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=timeout
    ) as session:
        yield Client(session, settings)


async def offer(
    requests: Sequence[Request], arrivals_s: Times, max_open: int | None, send: Send
) -> list[Row]:
    """Sends each request at its time, or as soon after it as fewer than ``max_open`` are open.
    Times are absolute, so a delay does not shift later requests."""
    slots = asyncio.Semaphore(max_open or len(requests))
    tasks = []
    started_s = perf_counter()
    async with asyncio.TaskGroup() as group:
        for request, arrival_s in zip(requests, arrivals_s.tolist(), strict=True):
            due_s = started_s + arrival_s
            if (wait_s := due_s - perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            await slots.acquire()
            task = group.create_task(send(request, due_s))
            task.add_done_callback(lambda _: slots.release())
            tasks.append(task)
    return [task.result() for task in tasks]
