"""The directory of one ``shoal serve``: its sockets, and a lock held while it lives."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shared.errors import ConfigError
from shared.link.address import (
    admin_path,
    make_private_directory,
    rank_instance,
    ranks_path,
)
from shared.wire.messages import ServiceName

PREFIX = "serve-"


class RunDirectory:
    """A new directory in ``base``, locked while this process lives and removed at the end.

    Leftovers of killed predecessors, whose locks are free, are removed first. Raises ConfigError
    for a base that is not private.
    """

    def __init__(self, base: Path) -> None:
        make_private_directory(base)
        try:
            with _locked(base):
                for entry in base.glob(f"{PREFIX}*"):
                    _sweep_if_dead(entry)
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
                lock = _try_lock(self.path)
        except OSError as error:
            raise ConfigError(f"mesh-dir: {base}: {error.strerror}") from None
        assert lock is not None, "nobody else locks a new directory"
        self._lock = lock

    def sweep(self, service: ServiceName, instance: str) -> None:
        """Removes the sockets of an ended process. Without a file that lists them they stay until
        the end, unused."""
        with suppress(OSError):
            for path in sockets_of(self.path, service, instance):
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep_if_dead(directory: Path) -> None:
    lock = _try_lock(directory)
    if lock is not None:
        shutil.rmtree(directory)
        os.close(lock)


@contextmanager
def _locked(base: Path) -> Iterator[None]:
    """Serializes sweeping and creation between processes."""
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


def sockets_of(directory: Path, service: ServiceName, instance: str) -> set[Path]:
    """All sockets bound by one process, and by the other ranks of a worker with it."""
    patterns = (
        f"{service}-{instance}.sock",
        f"{service}.*-{instance}.sock",
        f"admin.{service}-{rank_instance(instance, '*')}.sock",
    )
    bound = {path for pattern in patterns for path in directory.glob(pattern)}
    return bound | {admin_path(directory, service, instance), ranks_path(directory, instance)}
