"""Messages between a tokenizer and a process that reads images.

They are framed as in ``shared/process/child.py``. Files and pixels go through a file in memory that
both have. A process says that it is ready by an Answer. Then it gets a File and answers with the
size of the image; it gets Targets, or an empty message for a file that is not wanted, and answers
Targets with the size that it has put into memory. An ``error`` ends the file.
"""

import os

import msgspec


class File(msgspec.Struct, array_like=True):
    """``num_bytes`` are in memory."""

    num_bytes: int


class Targets(msgspec.Struct, array_like=True):
    """The width and height to scale an image to, as it is stored, and if it is turned by a
    quarter. Then the middle of the size ``crop`` is cut out."""

    upright: tuple[int, int]
    turned: tuple[int, int]
    crop: tuple[int, int] | None = None

    @property
    def made(self) -> list[tuple[int, int]]:
        """The sizes that pixels may have."""
        return [self.upright, self.turned] if self.crop is None else [self.crop]


class Answer(msgspec.Struct, array_like=True):
    width: int = 0
    height: int = 0
    error: str = ""


def put(fd: int, data: memoryview) -> None:
    """Replaces the content of the file in memory."""
    os.ftruncate(fd, 0)
    num_bytes = 0
    while num_bytes < len(data):
        num_bytes += os.pwrite(fd, data[num_bytes:], num_bytes)


def take(fd: int, data: memoryview) -> None:
    """Fills ``data`` from the file in memory, which is then empty. Raises EOFError if that holds
    less."""
    num_bytes = 0
    while num_bytes < len(data):
        num = os.preadv(fd, [data[num_bytes:]], num_bytes)
        if not num:
            raise EOFError
        num_bytes += num
    os.ftruncate(fd, 0)
