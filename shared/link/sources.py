"""Where a dialler finds the addresses of a service; each source keeps its own set current."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Protocol

from shared.link.address import find_sockets, ipc_address
from shared.process.metrics import LOOKUPS_FAILED
from shared.wire.messages import ServiceName

log = logging.getLogger(__name__)

LIST_S = 0.2
SETTLED_NS = 1_000_000_000  # two changes in one tick of a file system's clock look like one


class AddressSource(Protocol):
    """``addresses`` are ZeroMQ's, as of now; ``run`` keeps them current until cancelled."""

    addresses: set[str]

    async def run(self) -> None: ...


class Failures:
    """Counts the failures of one source; the first one in a row is logged."""

    def __init__(self) -> None:
        self._is_failing = False

    def count(self, text: str) -> None:
        LOOKUPS_FAILED.inc()
        if not self._is_failing:
            log.warning("%s", text)
        self._is_failing = True

    def end(self) -> None:
        self._is_failing = False


class SocketDirectory:
    """The sockets of a service in the mesh directory. While it cannot be read, the last known
    sockets."""

    def __init__(self, directory: Path, service: ServiceName, role: str) -> None:
        self.addresses: set[str] = set()
        self._directory = directory
        self._service = service
        self._role = role
        self._listed_ns = 0  # the directory's last change, as the last listing shows it
        self._failures = Failures()

    async def run(self) -> None:
        while True:
            self._list()
            await asyncio.sleep(LIST_S)

    def _list(self) -> None:
        try:
            changed_ns = self._directory.stat().st_mtime_ns
            if changed_ns != self._listed_ns:
                paths = find_sockets(self._directory, self._service, self._role)
                self.addresses = {ipc_address(path) for path in paths}
                self._listed_ns = changed_ns if time.time_ns() - changed_ns > SETTLED_NS else 0
        except OSError as error:  # for example too many open files
            self._failures.count(f"{self._directory}: {error.strerror}")
        else:
            self._failures.end()
