"""A connection to another process, as links see it, over any transport."""

from collections.abc import Callable, Sequence
from errno import EPROTONOSUPPORT
from typing import Any, Protocol

from shared.errors import ConfigError
from shared.link.keys import Keys
from shared.link.sources import AddressSource
from shared.wire.codec import Frame
from shared.wire.messages import ServiceName

LINGER_S = 0.5  # the time for sending queued messages when a process ends
HELLO_S = 5.0  # from the connection to its first message, with the handshake between
NO_MEMORY = "no memory for a message"
NO_HOSTS = "this installation has no connections to other machines (shared/link/hosts)"


class PeerGone(Exception):
    """The connection of a send has ended, though we may not have read of it yet."""


class Connection(Protocol):
    """It never reconnects and never blocks. Outgoing messages are queued without limit.

    ``remote`` names the other end in the log. ``owner`` is the service of the other end's key;
    None without keys.
    """

    remote: str
    owner: str | None

    def send(self, frames: Sequence[Frame]) -> None:
        """Queues a message without copying large frames. Raises PeerGone."""


class AcceptedConnection(Connection, Protocol):
    """A connection made by another process."""

    def end(self) -> None:
        """Closes it, if it is not lost already; its loss is reported as any other."""


class DialedConnection(Connection, Protocol):
    """A connection that we made, and may end."""

    @property
    def has_unsent(self) -> bool:
        """True if ``close`` would discard queued messages."""

    def close(self) -> None: ...


class Listening(Protocol):
    """A socket that others connect to, with its connections; ``address`` has its real port."""

    address: str

    @property
    def has_unsent(self) -> bool: ...

    def close(self) -> None: ...


# Each message; and the end or the failure of a connection, with the reason for a failed handshake,
# else "". All messages that a process sent before the end come before it.
OnFrames = Callable[[Any, list[Frame]], None]
OnLost = Callable[[Any, str], None]


class OtherHosts:
    """Connections to other machines; this installation has none.

    With ``keys`` they are encrypted, and both ends prove which service they are.
    """

    def __init__(self, keys: Keys | None) -> None: ...

    def listen(
        self, address: str, on_frames: OnFrames, on_lost: OnLost, service: ServiceName
    ) -> Listening:
        """Accepts ``service``. Raises ConfigError for an address that is not to be had, and for a
        key that is missing."""
        raise ConfigError(f"cannot listen on {address}: {NO_HOSTS}")

    def source(self, service: ServiceName, host: str, port: int) -> AddressSource:
        """The addresses of ``service``. Raises ConfigError if its key is missing."""
        raise ConfigError(f"{host}: {NO_HOSTS}")

    def dial(
        self, address: str, on_frames: OnFrames, on_lost: OnLost, service: ServiceName
    ) -> DialedConnection:
        """Raises OSError if a connection is impossible, as far as that is known at once."""
        raise OSError(EPROTONOSUPPORT, NO_HOSTS)

    def close(self) -> None: ...
