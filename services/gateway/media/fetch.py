"""Fetches images by HTTP, from allowed hosts only."""

import asyncio
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import ClientResponse, ClientSession, hdrs
from aiohttp.abc import AbstractResolver, ResolveResult
from prometheus_client import Counter
from yarl import URL

from services.gateway.http.admission import Reservation
from services.gateway.media.allowed_hosts import AllowedHosts
from shared.process.fair_slots import FairSlots
from shared.version import VERSION

FETCHES = Counter(
    "shoal_media_fetches",
    "URLs of images; result: fetched, refused (allowed-media-domains), timeout, too_large, status"
    " (the host's answer has no file) or failed",
    ["result"],
)
NUM_FETCHES = 16  # at once. Chosen
FETCH_TIMEOUT_S = 5.0  # for a file, with redirects. vLLM's
MAX_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
HEADERS = {
    hdrs.ACCEPT: "image/*",
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
            text = "with it the fetched images of the request have more bytes than the limit"
            raise NotFetched("too_large", f"{text}, max-body-bytes = {self._max_bytes}")

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
        # Lookups may take long, and cannot be cancelled.
        self._threads = ThreadPoolExecutor(NUM_FETCHES, "resolve")

    async def fetch(self, url: URL, owner: str, room: Room) -> bytearray:
        """The file has its bytes in ``room``. Raises NotFetched, Overloaded."""
        async with self._slots.hold(owner):
            try:
                file = await self._fetched(url, room)
            except NotFetched as error:
                FETCHES.labels(error.result).inc()
                raise
        FETCHES.labels("fetched").inc()
        return file

    async def _fetched(self, url: URL, room: Room) -> bytearray:
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S), self._session() as session:
                return await self._follow(session, url, room)
        except TimeoutError:
            text = f"it was not fetched in {FETCH_TIMEOUT_S:g} s"
            raise NotFetched("timeout", text) from None
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, _PrivateAddress | socket.gaierror):
                text = "its host has no public address, and none in allowed-media-domains"
                raise NotFetched("refused", text) from None
            raise NotFetched("failed", "its host cannot be reached") from None
        except aiohttp.ClientPayloadError:
            raise NotFetched("failed", "its host sent a part of it") from None
        except (aiohttp.ClientError, OSError, ValueError):
            raise NotFetched("failed", "its host does not answer by HTTP") from None

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[ClientSession]:
        """Without state, so that no connection outlives the check of its address."""
        connector = aiohttp.TCPConnector(
            limit=0,
            force_close=True,
            use_dns_cache=False,
            resolver=_Resolver(self._threads),
            socket_factory=self._socket,
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

    def _socket(self, info: aiohttp.AddrInfoType) -> socket.socket:
        """The only way to a connection: ``info`` is the address that is dialled."""
        family, kind, protocol, _, (address, port, *_) = info
        if not self._hosts.takes(str(address), int(port)):
            raise _PrivateAddress
        return socket.socket(family, kind, protocol)

    async def _follow(self, session: ClientSession, url: URL, room: Room) -> bytearray:
        for _ in range(MAX_REDIRECTS + 1):
            async with session.get(url, allow_redirects=False) as response:
                if response.status not in REDIRECTS:
                    return await _body(response, room)
                url = url.join(URL(response.headers.get(hdrs.LOCATION, "")))
            if self._hosts.refusal(url):
                text = "it redirects to a URL that allowed-media-domains does not allow"
                raise NotFetched("refused", text)
        raise NotFetched("status", f"it has more than {MAX_REDIRECTS} redirects")


class _Resolver(AbstractResolver):
    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, socket.getaddrinfo, host, port, family, socket.SOCK_STREAM
        )
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=port,
                family=of_address,
                proto=protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for of_address, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """Lookups end by themselves."""


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
