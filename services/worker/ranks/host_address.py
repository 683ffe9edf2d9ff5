"""The addresses of this host for ranks on other hosts."""

import socket

from shared.errors import ConfigError

ANY_PORT = 0
UNUSED_PORT = 9  # nothing is sent: the system only chooses a route


def address_of_first(name: str) -> str:
    """Returns this host's address among the addresses of ``name`` (master-addr), or raises
    ConfigError."""
    for address in _addresses(name):
        try:
            with socket.create_server((address, ANY_PORT), family=_family(address)):
                return address
        except OSError:
            continue
    raise ConfigError(f"master-addr: {name} is not this host, which has node-rank 0")


def address_towards(name: str) -> str:
    """Returns our address as seen by the host ``name`` (master-addr). Raises ConfigError if there
    is no route to it."""
    reason = ""
    for address in _addresses(name):
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, UNUSED_PORT))
                return str(probe.getsockname()[0])
            except OSError as error:
                reason = f": {error.strerror}"
    raise ConfigError(f"master-addr: there is no way to {name}{reason}")


def _addresses(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"master-addr: {name}: {error}") from None
    return [str(each[4][0]) for each in found]


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
