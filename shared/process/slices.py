"""Short time slices for services whose threads compute little at a time.

A thread that wakes runs before one with a longer slice, unless it has had more than its share of
the core. Shares do not change. Needs Linux 6.12; older kernels ignore the slice.
"""

import ctypes
import logging
import os
from pathlib import Path
from struct import Struct

log = logging.getLogger(__name__)

THREADS = Path("/proc/self/task")
SLICE_NS = 100_000  # the shortest; the kernel's default is at least 0.7 ms
# struct sched_attr: size, policy, flags, nice, priority, slice, deadline, period
ATTRIBUTES = Struct("IIQiIQQQ")
_SCHED_SETATTR = 314  # on x86-64
_KEEP_POLICY = 8


def shorten_slices() -> None:
    """Of all threads of this process; threads and processes they start later inherit the slice."""
    if os.uname().machine != "x86_64":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for thread in [int(each.name) for each in THREADS.iterdir()]:
        try:
            _shorten(libc, thread)
        except OSError as error:  # the kernel refuses, or the thread has just ended
            log.debug("the time slice of thread %d stays as it is: %s", thread, error.strerror)


def _shorten(libc: ctypes.CDLL, thread: int) -> None:
    nice = os.getpriority(os.PRIO_PROCESS, thread)
    attributes = ATTRIBUTES.pack(ATTRIBUTES.size, 0, _KEEP_POLICY, nice, 0, SLICE_NS, 0, 0)
    if libc.syscall(_SCHED_SETATTR, thread, attributes, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
