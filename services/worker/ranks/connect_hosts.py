"""Connects the hosts of a worker's ranks, first rank with first rank, for the parts of sums."""

import hmac
import ipaddress
import secrets
import socket
from contextlib import suppress

import torch
from torch import Tensor

from services.worker.layers.parallel import Parallel
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig

ADDRESS_BYTES, PORT_BYTES, NODE_BYTES, TOKEN_BYTES = 16, 2, 1, 32
GREETING_S = 5.0  # for a host that has connected to say which it is; chosen


def connect_hosts(parallel: Parallel, settings: WorkerConfig) -> dict[int, socket.socket]:
    """Returns a connection to each other host by its ``node-rank``, if this is the first rank of
    this host. All ranks call it together. Raises OSError.

    A host dials the hosts before it, and shows a token that only the ranks have.
    """
    if settings.nnodes == 1 or settings.master_addr is None:
        return {}
    token = bytes(parallel.first(_bytes(secrets.token_bytes(TOKEN_BYTES))).tolist())
    address = address_towards(settings.master_addr)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listening:
        endpoints = parallel.gather(_bytes(_packed(address, listening.getsockname()[1])))
        if parallel.rank != settings.ranks_of_host.start:
            return {}
        firsts = endpoints[:: len(settings.ranks_of_host)].tolist()
        found = {
            node: _dial(*_unpacked(bytes(firsts[node])), settings.node_rank, token)
            for node in range(settings.node_rank)
        }
        while len(found) < settings.nnodes - 1:
            found |= _accept(listening, token)
    for connection in found.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _dial(address: str, port: int, node: int, token: bytes) -> socket.socket:
    connection = socket.create_connection((address, port))
    connection.sendall(token + node.to_bytes(NODE_BYTES))
    return connection


def _accept(listening: socket.socket, token: bytes) -> dict[int, socket.socket]:
    """Returns an empty dict if a stranger has connected."""
    connection, _ = listening.accept()
    connection.settimeout(GREETING_S)
    greeting = _read(connection, TOKEN_BYTES + NODE_BYTES)
    shown, node = greeting[:TOKEN_BYTES], greeting[TOKEN_BYTES:]
    if not node or not hmac.compare_digest(shown, token):
        connection.close()
        return {}
    connection.settimeout(None)
    return {int.from_bytes(node): connection}


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    """Returns fewer bytes if the connection ends."""
    data = b""
    with suppress(OSError):
        while more := connection.recv(num_bytes - len(data)):
            data += more
    return data


def _packed(address: str, port: int) -> bytes:
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = f"::ffff:{ip}" if ip.version == 4 else ip
    return ipaddress.IPv6Address(mapped).packed + port.to_bytes(PORT_BYTES)


def _unpacked(packed: bytes) -> tuple[str, int]:
    ip = ipaddress.IPv6Address(packed[:ADDRESS_BYTES])
    return str(ip.ipv4_mapped or ip), int.from_bytes(packed[ADDRESS_BYTES:])


def _bytes(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


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
