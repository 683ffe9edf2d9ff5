"""The directory of one ``shoal serve``: its sockets, and a lock that it holds while it is alive."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shared.errors import ConfigError
from shared.link.address import make_private_directory, sockets_of
from shared.wire.messages import ServiceName

PREFIX = "serve-"


class RunDirectory:
    """A new directory in ``base``, locked while this process lives and removed at the end.

    What a killed predecessor left behind is swept first: its lock went with it. Raises ConfigError
    for a base that is not ours alone.
    """

    def __init__(self, base: Path) -> None:
        make_private_directory(base)
        try:
            with _locked(base):
                for entry in base.glob(f"{PREFIX}*"):
                    _sweep_if_dead(entry)
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
                self._lock = _try_lock(self.path)
        except OSError as error:
            raise ConfigError(f"mesh-dir: {base}: {error.strerror}") from None

    def sweep(self, service: ServiceName, instance: str) -> None:
        """Removes the sockets of a process that has ended. Without a file to list them, they stay
        until the end: nobody listens there."""
        with suppress(OSError):
            for path in sockets_of(self.path, service, instance):
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _sweep_if_dead(directory: Path) -> None:
    lock = _try_lock(directory)
    if lock is not None:
        shutil.rmtree(directory)
        os.close(lock)


@contextmanager
def _locked(base: Path) -> Iterator[None]:
    """One start at a time sweeps and creates."""
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _try_lock(directory: Path) -> int | None:
    """A descriptor that holds the lock of ``directory``, or None if another process holds it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
