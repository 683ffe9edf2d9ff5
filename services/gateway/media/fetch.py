"""Fetches images and videos by HTTP, from allowed hosts only."""

import asyncio
import socket
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from threading import Thread
from typing import Any

import aiohttp
from aiohttp import ClientResponse, ClientSession, hdrs
from aiohttp.abc import AbstractResolver, ResolveResult
from prometheus_client import Counter
from yarl import URL

from services.gateway.http.admission import Reservation
from services.gateway.media.allowed_hosts import AllowedHosts
from shared.process.fair_slots import FairSlots
from shared.version import VERSION
from shared.wire.messages import MediumKind

FETCHES = Counter(
    "shoal_media_fetches",
    "URLs of media; result: fetched, refused (allowed-media-domains), timeout, too_large, status"
    " (the host's answer has no file), failed, queued or cut (the request ended before or in it)",
    ["result"],
)
NUM_FETCHES = 16  # at once. Chosen
NUM_LOOKUPS = 32  # of names at once; one takes up to half a minute without a name server. Chosen
MAX_LOOKUPS_PER_KEY = 8  # of them. Chosen
FETCH_TIMEOUTS_S: dict[MediumKind, float] = {"image": 5.0, "video": 30.0}
"""For a file, with redirects. vLLM's."""
MAX_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
HEADERS = {
    hdrs.ACCEPT: "image/*,video/*",
    hdrs.ACCEPT_ENCODING: "identity",
    hdrs.USER_AGENT: f"shoal/{VERSION}",
}


class NotFetched(Exception):
    """``result`` is FETCHES'; the text is for the client, and says nothing of other machines."""

    def __init__(self, result: str, text: str) -> None:
        super().__init__(text)
        self.result = result


class Room:
    """For the files of one request; ``reservation`` holds their bytes."""

    def __init__(self, max_bytes: int, reservation: Reservation) -> None:
        self._max_bytes = max_bytes
        self._num_left = max_bytes
        self._reservation = reservation

    def check(self, num_bytes: int) -> None:
        """Raises NotFetched."""
        if num_bytes > self._num_left:
            text = "the files of the request have more bytes than max-body-bytes"
            raise NotFetched("too_large", f"{text} = {self._max_bytes}")

    def take(self, num_bytes: int) -> None:
        """Raises NotFetched, Overloaded."""
        self.check(num_bytes)
        self._reservation.hold(num_bytes)
        self._num_left -= num_bytes


class _PrivateAddress(OSError):
    pass


class Fetcher:
    """Fetches a few files at once, shared fairly between API keys."""

    def __init__(self, hosts: AllowedHosts) -> None:
        self._hosts = hosts
        self._slots = FairSlots(NUM_FETCHES)
        self._lookups = FairSlots(NUM_LOOKUPS, MAX_LOOKUPS_PER_KEY)

    async def fetch(self, url: URL, kind: MediumKind, owner: str, room: Room) -> bytearray:
        """The file has its bytes in ``room``. Raises NotFetched, Overloaded."""
        result = "queued"
        try:
            async with self._slots.hold(owner):
                result = "cut"
                file = await self._fetched(url, FETCH_TIMEOUTS_S[kind], owner, room)
            result = "fetched"
        except NotFetched as error:
            result = error.result
            raise
        finally:
            FETCHES.labels(result).inc()
        return file

    async def _fetched(self, url: URL, timeout_s: float, owner: str, room: Room) -> bytearray:
        dialler = _Dialler(self._hosts, url)
        resolver = _Resolver(self._lookups, owner)
        try:
            async with asyncio.timeout(timeout_s), _session(dialler, resolver) as session:
                return await _follow(session, dialler, room)
        except TimeoutError:
            text = f"it was not fetched in {timeout_s:g} s"
            raise NotFetched("timeout", text) from None
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, _PrivateAddress | socket.gaierror):
                text = "its host has no public address, and none in allowed-media-domains"
                is_refused = isinstance(error.os_error, _PrivateAddress)
                raise NotFetched("refused" if is_refused else "failed", text) from None
            raise NotFetched("failed", "its host cannot be reached") from None
        except aiohttp.ClientPayloadError:
            raise NotFetched("failed", "its host sent a part of it") from None
        except (aiohttp.ClientError, OSError, ValueError):
            raise NotFetched("failed", "its host does not answer by HTTP") from None


class _Dialler:
    """The only way to a connection, for ``url``."""

    def __init__(self, hosts: AllowedHosts, url: URL) -> None:
        self.hosts = hosts
        self.url = url

    def socket(self, info: aiohttp.AddrInfoType) -> socket.socket:
        """``info`` is the address that is dialled."""
        family, kind, protocol, _, (address, *_) = info
        if not self.hosts.takes(self.url, str(address)):
            raise _PrivateAddress
        return socket.socket(family, kind, protocol)


class _Resolver(AbstractResolver):
    """Lookups cannot be cancelled: each has a slot and a thread until its end."""

    def __init__(self, slots: FairSlots, owner: str) -> None:
        self._slots = slots
        self._owner = owner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        await self._slots.take(self._owner)
        answer: Future[list[Any]] = Future()
        found = asyncio.wrap_future(answer)
        found.add_done_callback(self._end)
        # An executor would have its threads joined at the end of the process.
        question = (answer, host, port, family, socket.SOCK_STREAM)
        try:
            Thread(target=_look_up, args=question, name="resolve", daemon=True).start()
        except RuntimeError as error:  # no thread is left
            answer.set_exception(OSError(str(error)))
        await asyncio.wait((found,))
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=port,
                family=of_address,
                proto=protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for of_address, _, protocol, _, address in found.result()
        ]

    def _end(self, found: asyncio.Future[list[Any]]) -> None:
        self._slots.give_back(self._owner)
        found.exception()  # of a lookup that its fetch did not wait for

    async def close(self) -> None:
        """Lookups end by themselves."""


def _look_up(answer: Future[list[Any]], *question: Any) -> None:
    try:
        answer.set_result(socket.getaddrinfo(*question))
    except Exception as error:
        answer.set_exception(error)


@asynccontextmanager
async def _session(dialler: _Dialler, resolver: _Resolver) -> AsyncIterator[ClientSession]:
    """Without state, so that no connection outlives the check of its address."""
    connector = aiohttp.TCPConnector(
        limit=0,
        force_close=True,
        use_dns_cache=False,
        resolver=resolver,
        socket_factory=dialler.socket,
    )
    async with ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        headers=HEADERS,
        auto_decompress=False,
        trust_env=False,
    ) as session:
        yield session


async def _follow(session: ClientSession, dialler: _Dialler, room: Room) -> bytearray:
    for _ in range(MAX_REDIRECTS + 1):
        async with session.get(dialler.url, allow_redirects=False) as response:
            if response.status not in REDIRECTS:
                return await _body(response, room)
            if not (place := response.headers.get(hdrs.LOCATION)):
                raise NotFetched("status", f"its host answers {response.status} without Location")
            dialler.url = dialler.url.join(URL(place))
        if dialler.hosts.refusal(dialler.url):
            text = "it redirects to a URL that allowed-media-domains does not allow"
            raise NotFetched("refused", text)
    raise NotFetched("status", f"it has more than {MAX_REDIRECTS} redirects")


async def _body(response: ClientResponse, room: Room) -> bytearray:
    if response.status != 200:
        raise NotFetched("status", f"its host answers {response.status}")
    if response.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity":
        raise NotFetched("status", "its host sends it compressed")
    room.check(response.content_length or 0)
    file = bytearray()
    async for chunk in response.content.iter_any():
        room.take(len(chunk))
        file += chunk
    return file
