"""``allowed-media-domains``: the hosts that images are fetched from. Pure."""

import re
from collections.abc import Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

from yarl import URL

from shared.errors import ConfigError

ANY = "*"
SCHEMES = ("http", "https")
PORTS = (80, 443)  # of a name without a port
NAT64 = IPv6Network("64:ff9b::/96")

_NAME = re.compile(r"[a-z0-9_]([\w.-]*[a-z0-9_])?", re.ASCII)

Address = IPv4Address | IPv6Address


class AllowedHosts:
    """``names`` are hosts, addresses and networks, with or without a port; ``*`` is every host at
    the usual ports. Addresses that are not public must be named, also for a named host: an answer
    of the name service opens no other machine. Raises ConfigError."""

    def __init__(self, names: Sequence[str]) -> None:
        self.is_empty = not names
        self._any = ANY in names
        self._hosts: set[tuple[str, int | None]] = set()
        self._networks: list[tuple[IPv4Network | IPv6Network, int | None]] = []
        for name in names:
            host, port = _split(name)
            try:
                self._networks.append((ip_network(host), port))
            except ValueError:
                if name != ANY and not _NAME.fullmatch(host):
                    raise ConfigError(
                        f"allowed-media-domains: {name!r} is not *, a host, an address or a"
                        " network, such as images.example, minio:9000 or 10.0.0.0/8"
                    ) from None
                self._hosts.add((host, port))

    def refusal(self, url: URL) -> str:
        """Why ``url`` is not fetched; empty: it is, from an address that ``takes`` allows."""
        host, port = url.raw_host or "", url.port or 0
        if url.scheme not in SCHEMES:
            return "expected http or https"
        if url.raw_user is not None or url.raw_password is not None:
            return "it has a user or a password"
        if self._is_named(host, port):
            return ""
        return f"allowed-media-domains does not name its host at port {port}"

    def takes(self, address: str, port: int) -> bool:
        """Whether a connection may be made."""
        try:
            found = _embedded(ip_address(address))
        except ValueError:
            return False
        return _is_public(found) or any(
            found in network and named in (None, port) for network, named in self._networks
        )

    def _is_named(self, host: str, port: int) -> bool:
        ports = (None, port) if port in PORTS else (port,)
        try:
            address = _embedded(ip_address(host))
        except ValueError:
            is_named = any((host, each) in self._hosts for each in ports)
            return is_named or (self._any and port in PORTS)
        is_named = any(address in net and named in ports for net, named in self._networks)
        return is_named or (self._any and port in PORTS and _is_public(address))


def _split(name: str) -> tuple[str, int | None]:
    """The host and the port of ``HOST``, ``HOST:PORT`` or ``[ADDRESS]:PORT``."""
    name = name.lower()
    host, _, port = name.rpartition(":")
    is_address = ":" in host and not host.endswith("]")
    if not host or is_address or not port.isdecimal():
        return name.strip("[]"), None
    return host.strip("[]"), int(port)


def _is_public(address: Address) -> bool:
    is_special = address.is_reserved or address.is_multicast
    is_site_local = isinstance(address, IPv6Address) and address.is_site_local
    return address.is_global and not is_special and not is_site_local


def _embedded(address: Address) -> Address:
    """The IPv4 address that an IPv6 address leads to, or the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo[1] if address.teredo else None
    return address.ipv4_mapped or address.sixtofour or teredo or address
