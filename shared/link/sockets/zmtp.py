"""ZMTP 3.0, the wire protocol of ZeroMQ (RFC 23), with its NULL mechanism: bytes to messages and
back; pure functions and a reader, no socket.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from shared.wire.codec import MAX_FRAME_BYTES, MIN_OWN_FRAME_BYTES, Frame

SocketType = Literal["DEALER", "ROUTER"]

MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame
READ_BYTES = 16 << 10  # at once: some hundred small messages
MIN_LARGE_BYTES = 4 << 10  # of a frame that is received into memory of its own
MAX_FRAMES = 1 << 16  # of one message
GREETING_BYTES = 64
SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
MECHANISM = b"NULL".ljust(20, b"\0")
GREETING = (SIGNATURE + b"\x03\x00" + MECHANISM).ljust(GREETING_BYTES, b"\0")
READY = b"\x05READY"
TYPE_NAME = b"\x0bSocket-Type"
PEERS: dict[bytes, tuple[SocketType, ...]] = {b"DEALER": ("ROUTER",), b"ROUTER": ("DEALER",)}


class ProtocolError(Exception):
    """The bytes are not ZMTP, or not of a socket that goes with ours."""


def handshake(socket_type: SocketType) -> bytes:
    """All bytes that our side sends before its first message."""
    value = socket_type.encode()
    body = READY + TYPE_NAME + struct.pack(">I", len(value)) + value
    return GREETING + bytes((COMMAND, len(body))) + body


def pack(frames: Sequence[Frame]) -> list[memoryview]:
    """The bytes of one message, in pieces; large frames are pieces themselves, not copied."""
    pieces: list[memoryview] = []
    small = bytearray()
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        size, more = len(frame), MORE if number < last else 0
        small += struct.pack(">BQ", more | LONG, size) if size > 255 else bytes((more, size))
        if size < MIN_OWN_FRAME_BYTES:
            small += frame
        else:
            pieces += memoryview(small), memoryview(frame)
            small = bytearray()
    if small:
        pieces.append(memoryview(small))
    return pieces


class Reader:
    """Finds the messages in the bytes of one peer of a socket of ``socket_type``.

    Bytes are received into ``space()``; a large frame is received into memory of its own.
    """

    def __init__(self, socket_type: SocketType) -> None:
        self._socket_type = socket_type
        self._buffer = bytearray(READ_BYTES)
        self._view = memoryview(self._buffer)
        self._num_held = 0  # bytes of the buffer that are no whole frame yet
        self._large: memoryview | None = None  # the large frame that is being received
        self._num_large = 0
        self._ends_message = False
        self._frames: list[Frame] = []
        self._is_greeted = False
        self.is_open = False  # the handshake is over

    @property
    def has_begun(self) -> bool:
        return self._is_greeted or self._num_held > 0

    def forget(self) -> None:
        """Drops the received part of a message. Nothing is read after it."""
        self._large = None
        self._frames.clear()

    def space(self) -> memoryview:
        """The place for the next received bytes; never empty."""
        if self._large is not None:
            return self._large[self._num_large :]
        return self._view[self._num_held :]

    def received(self, num_bytes: int) -> Iterator[list[Frame]]:
        """Yields the messages that end in the next ``num_bytes`` of ``space()``. Raises
        ProtocolError."""
        if self._large is None:
            yield from self._read(self._num_held + num_bytes)
            return
        self._num_large += num_bytes
        if self._num_large == len(self._large):
            frame, self._large = self._large.toreadonly(), None
            if message := self._add(frame, self._ends_message):
                yield message

    def _read(self, end: int) -> Iterator[list[Frame]]:
        """Reads the buffer up to ``end`` and moves the rest to its start."""
        buffer, start = self._buffer, 0
        if not self._is_greeted:
            start = self._read_greeting(end)
        while self._is_greeted and end - start >= 2:
            flags = buffer[start]
            body = start + (9 if flags & LONG else 2)
            if body > end:
                break
            size = int.from_bytes(buffer[start + 1 : body], "big")
            if size > MAX_FRAME_BYTES or flags > MORE | LONG | COMMAND:
                raise ProtocolError("a frame that is too long, or of an unknown kind")
            if bool(flags & COMMAND) == self.is_open:
                raise ProtocolError("READY must follow the greeting, once")
            if size >= MIN_LARGE_BYTES and body + size > end:
                self._begin_large(flags, size, self._view[body:end])
                start = end
            if body + size > end:
                break
            frame, start = bytes(self._view[body : body + size]), body + size
            if not self.is_open:
                self._read_ready(frame)
            elif message := self._add(frame, not flags & MORE):
                yield message
        self._num_held = end - start
        if start:
            buffer[: self._num_held] = buffer[start:end]

    def _add(self, frame: Frame, ends_message: bool) -> list[Frame] | None:
        """Returns the message that ``frame`` ends, if it does."""
        self._frames.append(frame)
        if not ends_message:
            if len(self._frames) == MAX_FRAMES:
                raise ProtocolError(f"a message of more than {MAX_FRAMES} frames")
            return None
        message, self._frames = self._frames, []
        return message

    def _begin_large(self, flags: int, size: int, part: memoryview) -> None:
        if not self.is_open:
            raise ProtocolError("a READY that is too long")
        self._large = np.empty(size, np.uint8).data
        self._num_large = len(part)
        self._large[: len(part)] = part
        self._ends_message = not flags & MORE

    def _read_greeting(self, end: int) -> int:
        """Returns the size of the greeting, 0 if it is incomplete."""
        found = bytes(self._buffer[:end])
        if found[:1] != SIGNATURE[:1] or found[9:10] not in (b"", SIGNATURE[9:]):
            raise ProtocolError("no greeting of ZMTP")
        if end < GREETING_BYTES:
            return 0
        if found[10] < 3 or found[12:32] != MECHANISM:
            raise ProtocolError("an old ZMTP, or one with keys")
        self._is_greeted = True
        return GREETING_BYTES

    def _read_ready(self, body: bytes) -> None:
        if not body.startswith(READY):
            raise ProtocolError("another command than READY after the greeting")
        kind = _properties(body[len(READY) :]).get(b"socket-type", b"")
        if self._socket_type not in PEERS.get(kind, ()):
            raise ProtocolError(f"a socket that is no peer of a {self._socket_type}")
        self.is_open = True


def _properties(body: bytes) -> dict[bytes, bytes]:
    """The metadata of a READY command; names in lower case. Raises ProtocolError."""
    found = {}
    try:
        while body:
            name, body = body[1 : 1 + body[0]], body[1 + body[0] :]
            (size,) = struct.unpack_from(">I", body)
            found[name.lower()], body = body[4 : 4 + size], body[4 + size :]
    except struct.error:
        raise ProtocolError("metadata that breaks off") from None
    return found
