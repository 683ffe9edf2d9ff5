"""A System V message queue, as the benchmark of the link needs it; plain calls of libc.

``python -m benchmarks.sysv QUEUE BYTES`` is the process that receives.
"""

import ctypes
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cost import Figures, cpu_s, figures, tell_cpu

LIMITS = Path("/proc/sys/kernel")
IPC_CREAT, IPC_RMID, MSG_TYPE = 0o1000, 0, 1
RAISED = {"msgmax": 16 << 20, "msgmnb": 64 << 20}

_libc = ctypes.CDLL(None, use_errno=True)


class Queue:
    """Messages of at most msgmax bytes; a send waits while the queue holds msgmnb bytes."""

    def __init__(self, identifier: int | None = None) -> None:
        is_new = identifier is None
        self.identifier = _check(_libc.msgget(0, IPC_CREAT | 0o600)) if is_new else identifier

    def send(self, payload: bytes) -> None:
        """Raises OSError, EINVAL above msgmax."""
        buffer = MSG_TYPE.to_bytes(8, "little") + payload
        _check(_libc.msgsnd(self.identifier, buffer, ctypes.c_size_t(len(payload)), 0))

    def receive_into(self, buffer: ctypes.Array[ctypes.c_char]) -> int:
        """``buffer`` has 8 bytes more than the largest payload; the payload's size."""
        size = ctypes.c_size_t(len(buffer) - 8)
        return _check(_libc.msgrcv(self.identifier, buffer, size, ctypes.c_long(0), 0))

    def remove(self) -> None:
        _libc.msgctl(self.identifier, IPC_RMID, None)


def measure(num_bytes: int, round_s: float) -> Figures:
    """Messages one way for ``round_s``; above msgmax in as many pieces as each needs."""
    piece = min(max_message_bytes(), num_bytes)
    queue, payload = Queue(), bytes(piece)
    num_pieces = -(-num_bytes // piece)
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sysv", str(queue.identifier), str(piece)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )
    try:
        assert process.stdout is not None
        other_before_s = float(process.stdout.readline())  # from now on it receives
        before_s, num_sent, started_s = cpu_s(), 0, time.perf_counter()
        while time.perf_counter() - started_s < round_s:
            for _ in range(num_pieces):
                queue.send(payload)
            num_sent += 1
        queue.send(b"")
        other_s = float(process.stdout.readline()) - other_before_s
        seconds = time.perf_counter() - started_s
        return figures(num_sent, num_bytes, seconds, cpu_s() - before_s, other_s)
    finally:
        process.kill()
        process.wait()
        queue.remove()


def receive(identifier: int, max_bytes: int) -> None:
    """Takes messages until an empty one; tells its CPU seconds before and after."""
    queue, buffer = Queue(identifier), ctypes.create_string_buffer(max_bytes + 8)
    tell_cpu()
    while queue.receive_into(buffer):
        pass
    tell_cpu()


def verdict(num_bytes: int) -> str:
    """What becomes of one message of this size at the limits that are set."""
    queue = Queue()
    try:
        queue.send(bytes(num_bytes))
    except OSError as error:
        return f"msgsnd fails: {error.strerror}"
    else:
        return "sent"
    finally:
        queue.remove()


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


if __name__ == "__main__":
    receive(*map(int, sys.argv[1:]))
