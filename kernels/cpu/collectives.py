"""Shared memory in which the ranks of a model exchange their parts. The ranks of one host share it;
the first rank of each host exchanges data with other hosts."""

import ctypes
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from socket import socket

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.pointers import address

WORD_BYTES = 4
SHARED_MEMORY = Path("/dev/shm")


def open_memory(name: str, num_bytes: int, *, creates: bool) -> mmap.mmap:
    """Opens shared memory under an unguessable ``name``; exactly one process ``creates`` it. Raises
    OSError, also if memory is short."""
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if creates else 0)
    descriptor = os.open(SHARED_MEMORY / name, flags, 0o600)
    try:
        if creates:
            os.posix_fallocate(descriptor, 0, num_bytes)
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def forget_name(name: str) -> None:
    """Unlinks the name; the memory lives until the last process unmaps it."""
    (SHARED_MEMORY / name).unlink(missing_ok=True)


def collectives_bytes(library: ctypes.CDLL, size: int) -> int:
    num_bytes = library["shoal_collectives_bytes"]
    num_bytes.restype = ctypes.c_size_t
    return int(num_bytes(size))


def check_wires(failure: int) -> None:
    """Raises ConnectionError or another OSError for an error code of native code."""
    if failure:
        raise OSError(failure, f"connection to another host's ranks: {os.strerror(failure)}")


class Collectives:
    """One rank's end of the shared memory; a process has one at a time. Programs of ``library`` sum
    in it.

    ``memory`` is zeroed at first and shared by the ranks ``of_host``, by default all ranks. The
    first of these has a connection to the first rank of each ``other`` host, keyed by host number.
    Methods raise OSError when a rank is lost.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        memory: mmap.mmap,
        rank: int,
        size: int,
        of_host: range | None = None,
        others: Mapping[int, socket] | None = None,
    ) -> None:
        self._memory = memory
        self._others = others or {}
        self._size = size
        self._gather = library["shoal_gather"]
        num_here = size if of_host is None else len(of_host)
        sockets = [connection.fileno() for connection in self._others.values()]
        first_ranks = [node * num_here for node in self._others]
        numbers = ctypes.c_int * len(sockets)
        library["shoal_meet"](
            ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory))),
            *(rank, size, num_here, len(sockets)),
            *(numbers(*sockets), numbers(*first_ranks)),
        )

    def sum(self, part: Tensor) -> Tensor:
        """Adds all ranks' parts in float32, in the order of ranks."""
        total = torch.zeros_like(part, dtype=torch.float32)
        for each in self.gather(part):
            total += each
        return total.to(part.dtype)

    def gather(self, part: Tensor) -> Tensor:
        """Each rank's part […] → [size, …], of any type."""
        if not part.numel():
            return part.new_empty(self._size, *part.shape)
        ours = part.contiguous().flatten().view(torch.uint8)
        num_words = -(-len(ours) // WORD_BYTES)
        words = functional.pad(ours, (0, num_words * WORD_BYTES - len(ours)))
        parts = ours.new_empty(self._size, len(words))
        check_wires(self._gather(address(words), ctypes.c_size_t(num_words), address(parts)))
        return parts[:, : len(ours)].contiguous().view(part.dtype).view(self._size, *part.shape)

    def first(self, own: Tensor) -> Tensor:
        return self.gather(own)[0]
