"""Which connection of a ROUTER a message or a loss belongs to.

zmq names a connection by its file descriptor only, and the kernel may give the number to the next
connection while messages and losses of the last one are still unread. For one descriptor, accepts
and losses come in turn; a connection is accepted before anything that came through it is read, and
lost after that.
"""

import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from shared.link.sockets.connection import PeerGone
from shared.wire.codec import Frame

Send = Callable[[Sequence[Frame]], None]
Address = tuple[Any, ...]


class RouterConnection:
    """A connection made by another process to our ROUTER; see ``Connection``. Its ``route``, which
    ``send`` puts before a message, is known from its first message on."""

    def __init__(self, descriptor: int, address: Address | None) -> None:
        self.owner: str | None = None
        self.route: bytes | None = None
        self.is_lost = False
        self._descriptor = descriptor
        self.address = address
        self._send: Send | None = None

    @property
    def remote(self) -> str:
        return str(self.address[0]) if self.address else "an unknown address"

    def end(self) -> None:
        """libzmq closes a connection without another end."""
        if self.is_lost or self.address is None:
            return
        with suppress(OSError), socket.socket(fileno=os.dup(self._descriptor)) as copy:
            if copy.getpeername() == self.address:
                copy.shutdown(socket.SHUT_RDWR)

    def meet(self, route: bytes, owner: str | None, send: Send) -> None:
        self.route, self.owner, self._send = route, owner, send

    def send(self, frames: Sequence[Frame]) -> None:
        if self._send is None or self.route is None:
            raise PeerGone
        self._send([self.route, *frames])


class RouterConnections:
    """The accepted connections before their loss is read."""

    def __init__(self) -> None:
        self._open: dict[int, deque[RouterConnection]] = {}
        self._by_route: dict[bytes, RouterConnection] = {}

    def accepted(self, descriptor: int) -> RouterConnection:
        connection = RouterConnection(descriptor, _remote_address(descriptor))
        self._open.setdefault(descriptor, deque()).append(connection)
        return connection

    def of_route(self, route: bytes) -> RouterConnection | None:
        return self._by_route.get(route)

    def meet(
        self, descriptor: int, route: bytes, owner: str | None, send: Send
    ) -> RouterConnection | None:
        """The newest with that descriptor and messages with the id ``route``; None if its loss was
        read.

        If the newest already has a route, the route belongs to an earlier connection of the same
        descriptor that is about to be lost.
        """
        queue = self._open.get(descriptor)
        if queue is None:
            return None
        if queue[-1].route is not None:
            taken = queue.pop()
            newest = RouterConnection(descriptor, taken.address)
            if queue:
                taken.address = queue[-1].address
                queue[-1] = taken
            else:
                self._forget(taken)
            queue.append(newest)
        queue[-1].meet(route, owner, send)
        self._by_route[route] = queue[-1]
        return queue[-1]

    def lost(self, descriptor: int) -> RouterConnection | None:
        """The oldest with that descriptor; None for one that was never accepted."""
        queue = self._open.get(descriptor)
        if queue is None:
            return None
        connection = queue.popleft()
        if not queue:
            del self._open[descriptor]
        self._forget(connection)
        connection.is_lost = True
        return connection

    def _forget(self, connection: RouterConnection) -> None:
        if connection.route is not None:
            del self._by_route[connection.route]


def _remote_address(descriptor: int) -> Address | None:
    """The connection may be gone by now, and the number be another's."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        address: Address = copy.getpeername()
        return address
    return None
