"""Addresses of services on other machines: ``tcp://HOST`` or ``tcp://HOST:PORT``.

A setting names a service, and the service decides which of its sockets that means: each has its
own port, counted from the first one of its service.
"""

import re
from typing import NamedTuple

from shared.wire.messages import ServiceName

FORM = "tcp://HOST or tcp://HOST:PORT, an IPv6 address in brackets"
MAX_PORT = 65534  # a scheduler also takes the port above, and so do ranks of several hosts
PATTERN = re.compile(
    r"tcp://(?:\[(?P<ipv6>[0-9a-fA-F:.]+(?:%\w+)?)\]|(?P<host>[\w.*-]+))"
    r"(?::(?P<port>\d{1,5}))?",
    re.ASCII,
)

# The sockets of services by (listener, dialer).
PORTS: dict[tuple[ServiceName, ServiceName], int] = {
    ("tokenizer", "gateway"): 5570,
    ("scheduler", "tokenizer"): 5571,
    ("scheduler", "worker"): 5572,
    ("worker", "worker"): 29501,  # vLLM's master-port
}
FIRST_PORTS: dict[ServiceName, int] = {"tokenizer": 5570, "scheduler": 5571, "worker": 29501}


class Endpoint(NamedTuple):
    """A host (IPv6 without brackets) and the first port of a service; None: the default one."""

    host: str
    port: int | None

    @staticmethod
    def parse(text: str) -> "Endpoint":
        """Raises ValueError with the expected form."""
        match = PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"must be {FORM}")
        port = None if match["port"] is None else int(match["port"])
        if port is not None and port > MAX_PORT:
            raise ValueError(f"port {port} is above {MAX_PORT}")
        return Endpoint(match["ipv6"] or match["host"], port)

    def port_of(self, listener: ServiceName, dialler: ServiceName) -> int:
        """The port of ``listener``'s socket for ``dialler``s; 0, any free one, stays 0."""
        default = PORTS[listener, dialler]
        if self.port is None:
            return default
        return self.port and self.port + default - FIRST_PORTS[listener]


def tcp_address(host: str, port: int) -> str:
    """A ZeroMQ address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def check_listened(text: str) -> str:
    """``text``, if it can be listened on. Raises ValueError."""
    host = Endpoint.parse(text).host
    if "*" in host and host != "*":
        raise ValueError(f"must be {FORM}; HOST may be *, alone")
    return text


def check_dialled(text: str) -> str:
    """``text``, if it can be dialled. Raises ValueError."""
    host, port = Endpoint.parse(text)
    if "*" in host or port == 0:
        raise ValueError(f"must be {FORM}; to dial, both must be given by name and number")
    return text


def check_host(text: str) -> str:
    """``text``, if it is a host's name or address alone. Raises ValueError."""
    if "*" in text or not PATTERN.fullmatch(tcp_address(text, MAX_PORT)):
        raise ValueError("must be a host's name or its address, alone")
    return text
