"""Which connection of a ROUTER a message or a loss belongs to.

zmq names a connection by its file descriptor only, and the kernel may give the number to the next
connection while messages and losses of the last one are still unread. For one descriptor, accepts
and losses come in turn; a connection is accepted before anything that came through it is read, and
lost after that.
"""

import os
import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass


@dataclass(eq=False)
class RouterConnection:
    """``route`` is the id of the peer's messages, the last one where there are two: the first
    belongs to a connection that had the descriptor before, and is about to be lost."""

    remote: str
    route: bytes | None = None
    refused_route: bytes | None = None


class RouterConnections:
    """The accepted connections whose loss was not read yet."""

    def __init__(self) -> None:
        self._open: dict[int, deque[RouterConnection]] = {}

    def accepted(self, descriptor: int) -> None:
        self._open.setdefault(descriptor, deque()).append(
            RouterConnection(_remote_host(descriptor))
        )

    def lost(self, descriptor: int) -> RouterConnection | None:
        """The oldest with that descriptor; None for one that was never accepted."""
        queue = self._open.get(descriptor)
        if queue is None:
            return None
        connection = queue.popleft()
        if not queue:
            del self._open[descriptor]
        return connection

    def newest(self, descriptor: int) -> RouterConnection | None:
        queue = self._open.get(descriptor)
        return queue[-1] if queue else None


def _remote_host(descriptor: int) -> str:
    """For the log only: the connection may be gone by now, and the number be another's."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        address = copy.getpeername()
        return str(address[0]) if isinstance(address, tuple) else "a process of this machine"
    return "an unknown address"
