"""The directory of one ``shoal serve``: its sockets, and a lock that says who is alive."""

import fcntl
import os
import shutil
from pathlib import Path


class RunDirectory:
    """``base/<pid>``, 0700, locked while this process lives; removed at the end.

    What a killed predecessor left behind is swept first: its lock went with it.
    """

    def __init__(self, base: Path) -> None:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        for entry in base.iterdir():
            if entry.name.isdigit() and _try_lock(entry) is not None:
                shutil.rmtree(entry)
        self.path = base / str(os.getpid())
        self.path.mkdir(mode=0o700)
        self._lock = _try_lock(self.path)

    def sweep(self, instance: str) -> None:
        """Removes the sockets of a process that has ended."""
        for path in self.path.glob(f"*-{instance}.sock"):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _try_lock(directory: Path) -> int | None:
    """A descriptor that holds the lock of ``directory``, or None where somebody else does."""
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
