"""The limit of client connections; above it idle ones are closed."""

import resource
from typing import Protocol

from services.gateway.metrics import CONNECTIONS, SHED_CONNECTIONS
from shared.errors import RETRY_AFTER_S, Unavailable

RESERVED_FILES = 256
"""Kept for the mesh and the log; a quarter of the process's limit of open files, if that is
less."""


class SheddableConnection(Protocol):
    """The part of a connection used by ``ConnectionLimit``. With a ``refusal`` it answers nothing
    else."""

    refusal: Unavailable | None

    @property
    def is_idle(self) -> bool:
        """Whether all its requests are answered."""

    @property
    def descriptor(self) -> int:
        """The number of its file."""

    def shed(self, reason: str) -> None:
        """Closes it at once."""


class ConnectionLimit:
    """The open connections, ordered by their time without a request, longest first.

    The kernel gives a new file the lowest free number. So a high number means that the process is
    about to run out of files, regardless of their use.
    """

    def __init__(self) -> None:
        self._open: dict[SheddableConnection, None] = {}

    def add(self, connection: SheddableConnection) -> None:
        """When files run out, the first idle connection makes room. If none is idle, the new one is
        refused with an answer, or closed if too few files are left even for that."""
        self._open[connection] = None
        CONNECTIONS.set(len(self._open))
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        num_left, num_reserved = limit - connection.descriptor, min(RESERVED_FILES, limit // 4)
        if num_left > num_reserved:
            return
        idle = next((each for each in self._open if each.is_idle and each is not connection), None)
        if idle is not None:
            idle.shed("idle")
        elif num_left > num_reserved // 2:
            SHED_CONNECTIONS.labels("refused").inc()
            connection.refusal = self._refusal(limit)
        else:
            connection.shed("closed")

    def note_end_of_request(self, connection: SheddableConnection) -> None:
        if connection in self._open:
            self._open[connection] = self._open.pop(connection)

    def remove(self, connection: SheddableConnection) -> None:
        self._open.pop(connection, None)
        CONNECTIONS.set(len(self._open))

    def _refusal(self, limit: int) -> Unavailable:
        return Unavailable(
            f"{len(self._open)} connections are open; more would take files that the gateway needs"
            f" itself (RLIMIT_NOFILE = {limit})",
            code="too_many_connections",
            retry_after_s=RETRY_AFTER_S,
        )
