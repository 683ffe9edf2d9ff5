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

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

ANY = "*"
SCHEMES = ("http", "https")
PORTS = (80, 443)  # of a name without a port
MAX_PORT = 65535
NAT64 = IPv6Network("64:ff9b::/96")
# IPv6 addresses that lead to an IPv4 address: NAT64, mapped, 6to4 and Teredo.
TO_IPV4 = (NAT64, *map(IPv6Network, ("::ffff:0:0/96", "2002::/16", "2001::/32")))
# Global for ipaddress: Azure's and Oracle's services of a machine, relays, documentation.
SPECIAL: tuple[Network, ...] = (
    *map(IPv4Network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24")),
    IPv6Network("3fff::/20"),
)

_LABEL = r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NUMBER_AT_END = re.compile(r"(.*\.)?([0-9]+|0x[0-9a-f]*)")  # as in 127.1, an address
_WITH_PORT = re.compile(r"(\[.*\]|[^:]*):([0-9]+)")


class AllowedHosts:
    """``names`` are hosts and addresses, with or without a port, and networks; ``*`` is every host
    at the usual ports. A named host may have any public address and the named addresses and
    networks, all others public addresses alone. A network allows no URL. Raises ConfigError."""

    def __init__(self, names: Sequence[str]) -> None:
        self.is_empty = not names
        self._any = ANY in names
        self._hosts: set[tuple[str | Address, int | None]] = set()
        self._networks: list[Network] = []
        for name in names:
            if name != ANY:
                self._add(name)
        if self._networks and not any(isinstance(host, str) for host, _ in self._hosts):
            raise ConfigError(
                f"allowed-media-domains: the network {self._networks[0]} is for the addresses of"
                " named hosts, and names no host itself; expected a host too, such as minio:9000"
            )

    def refusal(self, url: URL) -> str:
        """Why ``url`` is not fetched; empty: it is, from an address that ``takes`` allows."""
        host, port = url.raw_host or "", url.port or 0
        if url.scheme not in SCHEMES:
            return "expected http or https"
        if url.raw_user is not None or url.raw_password is not None:
            return "it has a user or a password"
        address = _address(host)
        is_any = self._any and port in PORTS and (address is None or _is_public(address))
        if is_any or self._is_named(address or host, port):
            return ""
        return f"allowed-media-domains does not name its host at port {port}"

    def takes(self, url: URL, address: str) -> bool:
        """Whether a connection to ``address`` may be made for ``url``, which has no refusal."""
        found, host, port = _address(address), url.raw_host or "", url.port or 0
        if found is None:
            return False
        if _is_public(found):
            return True
        if not self._is_named(_address(host) or host, port):
            return False
        is_named = any((found, each) in self._hosts for each in (None, port))
        return is_named or any(found in network for network in self._networks)

    def _is_named(self, host: str | Address, port: int) -> bool:
        ports = (None, port) if port in PORTS else (port,)
        return any((host, each) in self._hosts for each in ports)

    def _add(self, name: str) -> None:
        match = _WITH_PORT.fullmatch(name.lower())
        host, port = (match[1], int(match[2])) if match else (name.lower(), None)
        host = host.strip("[]")
        if port is not None and not 0 < port <= MAX_PORT:
            raise ConfigError(
                f"allowed-media-domains: {name!r} has the port {port}; expected 1 to {MAX_PORT}"
            )
        if (address := _address(host)) is not None:
            self._hosts.add((address, port))
        elif "/" in host and port is None:
            self._networks.append(_network(name, host))
        elif _NAME.fullmatch(host) and not _NUMBER_AT_END.fullmatch(host):
            self._hosts.add((host, port))
        else:
            raise _unknown(name)


def _network(name: str, host: str) -> Network:
    try:
        network = ip_network(host)
    except ValueError:
        raise _unknown(name) from None
    if isinstance(network, IPv6Network) and any(network.subnet_of(each) for each in TO_IPV4):
        raise ConfigError(
            f"allowed-media-domains: {name!r} stands for addresses of IPv4; expected their"
            " network in IPv4, such as 10.0.0.0/8"
        )
    return network


def _unknown(name: str) -> ConfigError:
    return ConfigError(
        f"allowed-media-domains: {name!r} is not *, a host, an address or a network, such as"
        " images.example, minio:9000, [fd00::5]:9000 or 10.0.0.0/8"
    )


def _is_public(address: Address) -> bool:
    is_special = address.is_reserved or address.is_multicast
    is_site_local = isinstance(address, IPv6Address) and address.is_site_local
    is_listed = any(address in network for network in SPECIAL)
    return address.is_global and not (is_special or is_site_local or is_listed)


def _address(text: str) -> Address | None:
    """The address that connections to ``text`` reach: an IPv6 address may lead to one of IPv4."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv4Address):
        return address
    if address in NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo[1] if address.teredo else None
    return address.ipv4_mapped or address.sixtofour or teredo or address
