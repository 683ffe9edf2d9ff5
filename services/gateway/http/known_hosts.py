"""Host names accepted by a server without keys.

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
