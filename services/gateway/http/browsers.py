"""The limits of other sites' pages in a browser: allowed origins (the Fetch standard's CORS) and,
without keys, allowed names of the server.

A page of any site can have its own name bound to 127.0.0.1 once it is loaded (DNS rebinding). For a
browser the server then is that site, and scripts of the site read its answers; only ``Host`` shows
the difference.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from services.gateway.http.internal_socket import is_own
from services.gateway.http.violations import show
from shared.settings.gateway import GatewayConfig

ANY = "*"
LOCALHOST = "localhost"
_HOST = re.compile(r"(?:\[(?P<ipv6>[^\]]*)\]|(?P<name>[^:\[\]]*))(?::\d*)?")
FETCH_SITE = "Sec-Fetch-Site"  # no script can set it
EXPOSED = "X-Request-Id, Retry-After, X-Shoal-Dropped-Turns, X-Shoal-Warnings"
METHODS = "GET, POST, DELETE"
MAX_AGE_S = 600


class Cors:
    """Admits pages of ``origins``; without any, browsers keep all others out."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    @web.middleware
    async def preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers a browser's preflight request: it has no key yet."""
        is_asking = hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if request.method != hdrs.METH_OPTIONS or not is_asking or not self._lets_in(request):
            return await handler(request)
        wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        if not wanted.isascii():
            raise web.HTTPBadRequest(reason="Access-Control-Request-Headers holds no names")
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: METHODS,
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: wanted,
            hdrs.ACCESS_CONTROL_MAX_AGE: str(MAX_AGE_S),
        }
        return web.Response(status=204, headers=headers)

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Adds the headers by which the browser lets the page read ``response``."""
        if self._lets_in(request):
            origin = ANY if ANY in self._origins else request.headers[hdrs.ORIGIN]
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raises web.HTTPForbidden for a page that may not use the API: browsers send forms
        anywhere, and keep back only the answer."""
        if hdrs.ORIGIN in request.headers and not self._lets_in(request) and not _is_ours(request):
            origin = show(request.headers[hdrs.ORIGIN])
            raise web.HTTPForbidden(reason=f"the Origin {origin} is none of allowed-origins")
        return await handler(request)

    def _lets_in(self, request: web.Request) -> bool:
        origin = request.headers.get(hdrs.ORIGIN)
        return origin is not None and bool({origin, ANY} & self._origins)


def _is_ours(request: web.Request) -> bool:
    """Whether the page is from this server. The scheme and the Host may be a proxy's: then only the
    browser knows."""
    _, _, host = request.headers[hdrs.ORIGIN].partition("://")
    is_same = request.headers.get(FETCH_SITE) == "same-origin"
    return is_same or host == request.headers.get(hdrs.HOST)


class KnownHosts:
    """Lets requests pass that name an address, ``names`` or nobody."""

    def __init__(self, names: Sequence[str], internal_socket: Path) -> None:
        self._names = {LOCALHOST, *(name.lower() for name in names)}
        self._internal_socket = internal_socket

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raises web.HTTPMisdirectedRequest."""
        host = request.headers.get(hdrs.HOST, "")
        if not self._knows(host) and not is_own(request, self._internal_socket):
            raise web.HTTPMisdirectedRequest(
                reason=f"the Host is {show(host)}; expected localhost, an IP address or one of"
                " allowed-hosts"
            )
        return await handler(request)

    def _knows(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if ANY in self._names or match is None:
            return ANY in self._names
        name = match["ipv6"] or match["name"]
        return not name or name.lower() in self._names or _is_address(name)


def known_hosts(config: GatewayConfig, internal_socket: Path) -> KnownHosts | None:
    """None if any name may be ours: the names of a network are not known here."""
    is_local = config.uds is None and _is_loopback(config.host)
    if not is_local and not config.allowed_hosts:
        return None
    return KnownHosts(config.allowed_hosts, internal_socket)


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == LOCALHOST


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        ip_address(name)
        return True
    return False
