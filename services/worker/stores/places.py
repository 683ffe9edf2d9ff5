"""The files of one store: places of equal size, each with a record.

``store.json`` has the format and the sizes, ``blocks.bin`` the places, ``records.bin`` their
records; ``states.bin`` and ``records_of_states.bin`` are the same for states. A record is cleared
before its place is written, and written after it. Readers believe a place if its record has the
wanted key and its bytes have the checksum of the record. So a kill at any time loses the block of
that moment and no other.
"""

import errno
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from struct import Struct

from services.worker.stores.folder import Part, open_private

RECORD = Struct("<16sQI")  # key, generation and checksum of the place
RECORD_BYTES = 64  # with the checksum of the record and zeros
FREE = bytes(RECORD_BYTES)

Pieces = Sequence[memoryview]  # the memory of a block, or a state


class BlockLost(Exception):
    """A place does not have the wanted block; the text is a reason of the metric."""


def checksum(pieces: Pieces) -> int:
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc


class Places:
    """The places of a part of a worker's store, for reading. Raises OSError."""

    def __init__(self, folder: Path, part: Part, *, writes: bool = False) -> None:
        self.part = part
        self._blocks = open_private(folder / part.content, writes=writes)
        try:
            self._records = open_private(folder / part.records, writes=writes)
        except OSError:
            os.close(self._blocks)
            raise

    def load(self, place: int, key: bytes, pieces: Pieces) -> None:
        """Copies a place to ``pieces``, which have any content after a BlockLost."""
        if self.read(place, key, pieces) != checksum(pieces):
            raise BlockLost("damaged")

    def read(self, place: int, key: bytes, pieces: Pieces) -> int:
        """As ``load``, but leaves the check to the caller: the right bytes have the returned
        checksum."""
        try:
            record = os.pread(self._records, RECORD_BYTES, place * RECORD_BYTES)
            if (found := read_record(record)) is None or found[0] != key:
                raise BlockLost("other")
            size = self.part.place_bytes
            if os.preadv(self._blocks, pieces, place * size) != size:
                raise BlockLost("damaged")
        except OSError as error:
            raise BlockLost("unreadable") from error
        return found[2]

    @property
    def is_removed(self) -> bool:
        return os.fstat(self._blocks).st_nlink == 0

    def close(self) -> None:
        os.close(self._blocks)
        os.close(self._records)


def read_record(record: bytes) -> tuple[bytes, int, int] | None:
    """Key, generation and checksum of a place; None if it is free."""
    body, crc = record[: RECORD.size], record[RECORD.size : RECORD.size + 4]
    if len(crc) < 4 or zlib.crc32(body) != int.from_bytes(crc, "little"):
        return None
    key, generation, of_place = RECORD.unpack(body)
    return key, generation, of_place


class OwnPlaces(Places):
    """The places of a part of the own store. ``keys`` has the key of each full place, the oldest at
    the front."""

    def __init__(self, folder: Path, part: Part) -> None:
        """Takes the files that are there, or makes new ones with room for all places. A store of
        another size keeps the blocks of the remaining places."""
        super().__init__(folder, part, writes=True)
        self.keys: dict[int, bytes] = {}
        self._generation = 0
        for fd, size in ((self._blocks, part.place_bytes), (self._records, RECORD_BYTES)):
            os.ftruncate(fd, part.num_places * size)
            os.posix_fallocate(fd, 0, part.num_places * size)
        self._read_records()

    def _read_records(self) -> None:
        found = []
        with open(os.dup(self._records), "rb") as stream:
            for place in range(self.part.num_places):
                if record := read_record(stream.read(RECORD_BYTES)):
                    found.append((record[1], place, record[0]))
        for generation, place, key in sorted(found):
            self.keys[place] = key
            self._generation = generation

    def save(self, place: int, key: bytes, pieces: Pieces) -> None:
        """Raises OSError if the place was not written; then it is free."""
        self.forget(place)
        size = self.part.place_bytes
        if os.pwritev(self._blocks, pieces, place * size) != size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._generation += 1
        body = RECORD.pack(key, self._generation, checksum(pieces))
        crc = zlib.crc32(body).to_bytes(4, "little")
        self._write_record(place, (body + crc).ljust(RECORD_BYTES, b"\0"))
        self.keys[place] = key

    def forget(self, place: int) -> None:
        """Raises OSError."""
        if self.keys.pop(place, None) is not None:
            self._write_record(place, FREE)

    def _write_record(self, place: int, record: bytes) -> None:
        if os.pwrite(self._records, record, place * RECORD_BYTES) != RECORD_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
