"""A System V message queue, as the benchmark of the link needs it; plain calls of libc."""

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMITS = Path("/proc/sys/kernel")
IPC_CREAT, IPC_RMID, MSG_TYPE = 0o1000, 0, 1
RAISED = {"msgmax": 16 << 20, "msgmnb": 64 << 20}

_libc = ctypes.CDLL(None, use_errno=True)


class Queue:
    """Messages of at most msgmax bytes; a send waits while the queue holds msgmnb bytes."""

    def __init__(self, identifier: int | None = None) -> None:
        self.identifier = identifier or _check(_libc.msgget(0, IPC_CREAT | 0o600))

    def send(self, payload: bytes) -> None:
        """Raises OSError, EINVAL above msgmax."""
        buffer = MSG_TYPE.to_bytes(8, "little") + payload
        _check(_libc.msgsnd(self.identifier, buffer, ctypes.c_size_t(len(payload)), 0))

    def receive_into(self, buffer: ctypes.Array) -> int:
        """``buffer`` has 8 bytes more than the largest payload; the payload's size."""
        size = ctypes.c_size_t(len(buffer) - 8)
        return _check(_libc.msgrcv(self.identifier, buffer, size, ctypes.c_long(0), 0))

    def remove(self) -> None:
        _libc.msgctl(self.identifier, IPC_RMID, None)


def max_message_bytes() -> int:
    return int((LIMITS / "msgmax").read_text())


@contextmanager
def raised_limits() -> Iterator[bool]:
    """Whether the kernel let us; afterwards they are as before."""
    before = {name: (LIMITS / name).read_text() for name in RAISED}
    try:
        try:
            for name, value in RAISED.items():
                (LIMITS / name).write_text(str(value))
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            yield False
        else:
            yield True
    finally:
        for name, text in before.items():
            if (LIMITS / name).read_text() != text:
                (LIMITS / name).write_text(text)


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
