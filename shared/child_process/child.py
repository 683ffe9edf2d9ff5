"""A process that does risky work for its parent and may die of it: its side of the pipes.

Stdin and stdout carry msgpack values, each after its length.
"""

import ctypes
import os
import resource
import signal
import struct
import sys

import msgspec

LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1


def begin() -> bool:
    """Ties the process to its parent; False if that is gone already."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent, which ends us
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return os.getppid() == parent


def limit_memory(more_bytes: int) -> None:
    """Allows ``more_bytes`` than the process has now."""
    with open("/proc/self/statm") as file:
        num_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def frame(message: msgspec.Struct | None) -> bytes:
    """``message`` after its length; None is an empty one."""
    data = msgspec.msgpack.encode(message) if message is not None else b""
    return LENGTH.pack(len(data)) + data


def read() -> bytes:
    """Nothing for an empty message and at the end of the pipe, which may come in the middle."""
    head = sys.stdin.buffer.read(LENGTH.size)
    size = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 0
    data = sys.stdin.buffer.read(size)
    return data if len(data) == size else b""


def write(message: msgspec.Struct) -> None:
    """Ends the process if the pipe has no reader any more."""
    try:
        os.write(sys.stdout.fileno(), frame(message))
    except BrokenPipeError:
        os._exit(0)
