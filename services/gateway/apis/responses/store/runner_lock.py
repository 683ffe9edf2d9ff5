"""Which gateways make the responses that are not whole yet: each holds a lock while it lives."""

import fcntl
import os
import secrets
from pathlib import Path

TOKEN_BYTES = 8


class RunnerLock:
    """A file beside the store, ``token`` in its name, which is locked until ``close`` or the end of
    our process. Raises OSError where it cannot be made."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self.token = secrets.token_hex(TOKEN_BYTES)
        self._descriptor = os.open(
            self._path(self.token), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def is_alive(self, token: str) -> bool:
        """Whether its process holds the lock; what a dead one has left is removed."""
        if token == self.token:
            return True
        path = self._path(token)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        path.unlink(missing_ok=True)
        return False

    def close(self) -> None:
        self._path(self.token).unlink(missing_ok=True)
        os.close(self._descriptor)

    def _path(self, token: str) -> Path:
        return self._store.with_name(f"{self._store.name}.{token}.lock")
