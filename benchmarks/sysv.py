"""A System V message queue for the benchmark of the link, by plain libc calls.

``python -m benchmarks.sysv receive QUEUE BYTES`` is the receiving process; ``send BYTES MSGMAX``
the process that tests the fate of one message.
"""

import ctypes
import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cost import Figures, cpu_s, figures, tell_cpu

LIMITS = Path("/proc/sys/kernel")
IPC_CREAT, IPC_RMID, MSG_TYPE = 0o1000, 0, 1
CLONE_NEWIPC = 0x08000000
RAISED = {"msgmax": 16 << 20, "msgmnb": 64 << 20}
WAIT_S = 2.0  # a message of many megabytes is in a queue within milliseconds
SENDING, SENT, WAITS = "sending", "sent", "msgsnd waits, and nothing else is in the queue"

_libc = ctypes.CDLL(None, use_errno=True)


class Queue:
    """Messages of at most msgmax bytes; a send blocks while the queue holds msgmnb bytes."""

    def __init__(self, identifier: int | None = None) -> None:
        if identifier is None:
            identifier = _check(_libc.msgget(0, IPC_CREAT | 0o600))
        self.identifier = identifier

    def send(self, payload: bytes) -> None:
        """Raises OSError, with EINVAL above msgmax."""
        buffer = MSG_TYPE.to_bytes(8, "little") + payload
        _check(_libc.msgsnd(self.identifier, buffer, ctypes.c_size_t(len(payload)), 0))

    def receive_into(self, buffer: ctypes.Array[ctypes.c_char]) -> int:
        """Returns the payload's size. ``buffer`` has 8 bytes more than the largest payload."""
        size = ctypes.c_size_t(len(buffer) - 8)
        return _check(_libc.msgrcv(self.identifier, buffer, size, ctypes.c_long(0), 0))

    def remove(self) -> None:
        _libc.msgctl(self.identifier, IPC_RMID, None)


def measure(num_bytes: int, round_s: float) -> Figures:
    """Messages one way for ``round_s``; above msgmax in as many pieces as needed."""
    piece = min(max_message_bytes(), num_bytes)
    queue, payload = Queue(), bytes(piece)
    num_pieces = -(-num_bytes // piece)
    process = _start("receive", queue.identifier, piece)
    try:
        assert process.stdout is not None
        other_before_s = float(process.stdout.readline())  # it receives from now on
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
    """Takes messages until an empty one; prints its CPU seconds before and after."""
    queue, buffer = Queue(identifier), ctypes.create_string_buffer(max_bytes + 8)
    tell_cpu()
    while queue.receive_into(buffer):
        pass
    tell_cpu()


def verdict(num_bytes: int, msgmax: int = 0) -> str:
    """The fate of one message of this size at the kernel's default limits, or with only ``msgmax``
    raised. Tested, if root, by a process in an IPC namespace of its own, so that the machine's
    limits do not change."""
    with _start("send", num_bytes, msgmax) as process:
        assert process.stdout is not None
        text = process.stdout.readline().decode().strip()
        if text != SENDING:
            return text
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return WAITS
        return process.stdout.read().decode().strip()


def send(num_bytes: int, msgmax: int) -> None:
    """Prints before it sends, and the outcome."""
    try:
        _check(_libc.unshare(CLONE_NEWIPC))
        if msgmax:
            (LIMITS / "msgmax").write_text(str(msgmax))
    except OSError as error:
        print(f"not tried: {error.strerror}")
        return
    queue = Queue()
    print(SENDING, flush=True)
    try:
        queue.send(bytes(num_bytes))
    except OSError as error:
        print(f"msgsnd fails: {error.strerror}")
    else:
        print(SENT)


def max_message_bytes() -> int:
    return int((LIMITS / "msgmax").read_text())


@contextmanager
def raised_limits() -> Iterator[bool]:
    """Yields True if the limits could be raised; restores them afterwards."""
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


def _start(verb: str, *numbers: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sysv", verb, *map(str, numbers)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


if __name__ == "__main__":
    verbs: dict[str, Callable[[int, int], None]] = {"receive": receive, "send": send}
    verbs[sys.argv[1]](*map(int, sys.argv[2:]))
