"""Sends a request to a server until its answer is final."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType

import aiohttp
import msgspec

from shared.errors import ShoalError, text_of_fault

PASSING = {408, 429, 502, 503, 504, 529}
"""Status codes that justify a retry; 529 is Anthropic's 503."""

FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 30.0
MAX_TEXT_CHARS = 2000
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10)
LOST = (aiohttp.ClientError, ConnectionError)


class BatchStopped(ShoalError):
    """A batch of requests ends early."""


class ServerLost(BatchStopped):
    """The server did not answer for too long to come back by itself."""


class KeyRefused(BatchStopped):
    """The server refuses the API key for all requests."""


class NoReply(ShoalError):
    """The server does not reply to one request, but to others."""


@dataclass(frozen=True, slots=True)
class Reply:
    """``body`` is JSON in one line."""

    status: int
    request_id: str
    body: bytes


class Sender:
    """``session`` has the server's address and the key. Temporary errors are retried for
    ``retry_s``. Each try, without the pauses between, runs within a ``place``."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        retry_s: float,
        timeout_s: float | None,
        headers: Mapping[str, str] = MappingProxyType({}),
        place: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self._session = session
        self._headers = headers
        self._place = place
        self._retry_s = retry_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def send(self, url: str, body: bytes) -> Reply:
        """Raises NoReply, ServerLost and KeyRefused."""
        started_s = time.monotonic()
        pause_s = FIRST_PAUSE_S
        while True:
            async with self._place():
                reply, wait_s, reason = await self._try(url, body)
            if reply is not None and wait_s is None:
                return reply
            left_s = started_s + self._retry_s - time.monotonic()
            if left_s <= 0 and reply is not None:
                return reply
            if left_s <= 0:
                await self._check_server()
                raise NoReply(reason)
            await asyncio.sleep(min(wait_s or pause_s, left_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _check_server(self) -> None:
        """Raises ServerLost."""
        try:
            async with self._session.get("/health", timeout=PROBE_TIMEOUT):
                return
        except (*LOST, TimeoutError) as error:
            raise ServerLost(f"the server does not answer: {text_of_fault(error)}") from None

    async def _try(self, url: str, body: bytes) -> tuple[Reply | None, float | None, str]:
        """The reply or None; the seconds to wait before a retry (0: any), or None if a retry is
        useless; and the reason for a missing reply."""
        try:
            async with self._session.post(
                url, data=body, timeout=self._timeout, headers=self._headers
            ) as response:
                data = await response.read()
        except LOST as error:
            return None, 0.0, text_of_fault(error)
        except TimeoutError:
            raise NoReply(f"no reply within {self._timeout.total:g} s") from None
        if response.status == 401:
            raise KeyRefused("the server refuses the API key, or needs one (401)")
        headers = response.headers
        reply = Reply(response.status, headers.get("X-Request-Id", ""), _one_line(data))
        is_final = headers.get("X-Should-Retry") == "false" or response.status not in PASSING
        return reply, None if is_final else _seconds(headers.get("Retry-After", "")), ""


def _seconds(text: str) -> float:
    try:
        return min(max(0.0, float(text)), MAX_PAUSE_S)
    except ValueError:
        return 0.0


def _one_line(data: bytes) -> bytes:
    """JSON without line ends; any other body becomes an error object."""
    try:
        return msgspec.json.format(data, indent=-1)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        text = data[: 4 * MAX_TEXT_CHARS].decode(errors="replace")[:MAX_TEXT_CHARS]
        return msgspec.json.encode({"error": {"message": text, "code": "not_json"}})
