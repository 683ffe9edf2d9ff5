"""Encodes messages with their arrays as frames, and decodes them. Pure functions, no socket.

A message is ``[header, body, body, …]``. The header is msgpack ``[message, [[dtype, shape], …]]``.
The body frames joined are the arrays joined, little-endian and without gaps. The sender chooses the
cuts between frames: small arrays share a frame, one of 64 KiB or more has its own and is not
copied, one above 16 MiB is split. A frame has an upper bound, a message has none.
"""

from collections.abc import Iterator, Sequence
from math import prod

import msgspec
import numpy as np

from shared.errors import CodecError
from shared.wire.messages import ARRAYS, MORE_ARRAYS, Message

MAX_HEADER_BYTES = 4 << 20
MAX_BODY_FRAME_BYTES = 16 << 20
MAX_FRAME_BYTES = 64 << 20
MIN_OWN_FRAME_BYTES = 64 << 10
MAX_DIMS = 8
ITEM_BYTES = {"u1": 1, "i4": 4, "i8": 8, "f4": 4}  # by dtype

Frame = bytes | memoryview
Array = np.ndarray


class HeaderTooLong(CodecError):
    """The header of a message to send exceeds ``MAX_HEADER_BYTES``."""


class ArraySpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    dtype: str
    shape: list[int]

    def num_bytes(self) -> int:
        item_bytes = ITEM_BYTES.get(self.dtype)
        if item_bytes is None or len(self.shape) > MAX_DIMS or min(self.shape, default=0) < 0:
            raise CodecError(
                f"no such array: dtype {self.dtype[:16]!r}, shape {self.shape[:MAX_DIMS]}"
            )
        return prod(self.shape) * item_bytes


class Header(msgspec.Struct, frozen=True, array_like=True, gc=False):
    message: Message
    arrays: list[ArraySpec]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def encode(message: Message, arrays: Sequence[Array] = ()) -> list[Frame]:
    """The frames of one message. Large arrays are referenced, so they must not change until sent.
    Raises HeaderTooLong, and CodecError for arrays of other types than the wire's."""
    specs = [ArraySpec(array.dtype.str.lstrip("<|"), list(array.shape)) for array in arrays]
    for spec in specs:
        spec.num_bytes()
    header = _encoder.encode(Header(message, specs))
    if len(header) > MAX_HEADER_BYTES:
        kind = type(message).__name__
        raise HeaderTooLong(
            f"{kind} header of {len(header)} bytes; the limit is {MAX_HEADER_BYTES}"
        )
    return [header, *_pack(arrays)]


def decode(frames: Sequence[Frame]) -> tuple[Message, list[Array]]:
    """The message and its read-only arrays: views if an array lies in one frame, else copies.

    Raises CodecError for anything that ``encode`` of this protocol major cannot produce.
    """
    if not frames or len(frames[0]) > MAX_HEADER_BYTES:
        raise CodecError("no header, or one above the limit")
    try:
        header = _decoder.decode(frames[0])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CodecError(f"not a message: {error}") from None
    _check_arrays(header)
    return header.message, _unpack(header.arrays, [memoryview(frame) for frame in frames[1:]])


def _check_arrays(header: Header) -> None:
    allowed, more = ARRAYS.get(type(header.message), ()), MORE_ARRAYS.get(type(header.message))
    if more is not None:
        allowed += (more,) * (len(header.arrays) - len(allowed))
    found = [spec.dtype for spec in header.arrays if len(spec.shape) == 1]
    is_good = len(found) == len(header.arrays) == len(allowed) and all(
        dtype in dtypes for dtype, dtypes in zip(found, allowed, strict=True)
    )
    if not is_good:
        kind = type(header.message).__name__
        raise CodecError(f"{kind} with arrays {header.arrays[:MAX_DIMS]} where {allowed} belong")


def _pack(arrays: Sequence[Array]) -> Iterator[Frame]:
    small: list[bytes] = []
    for array in arrays:
        if array.nbytes < MIN_OWN_FRAME_BYTES:
            small.append(array.tobytes())
            continue
        if any(small):
            yield b"".join(small)
            small = []
        view = np.ascontiguousarray(array).data.cast("B")
        for start in range(0, len(view), MAX_BODY_FRAME_BYTES):
            yield view[start : start + MAX_BODY_FRAME_BYTES]
    if any(small):
        yield b"".join(small)


def _unpack(specs: list[ArraySpec], frames: list[memoryview]) -> list[Array]:
    sizes = [spec.num_bytes() for spec in specs]
    if sum(sizes) != sum(len(frame) for frame in frames):
        raise CodecError(f"arrays of {sum(sizes)} bytes in frames of another size")
    pieces = _cut(frames, sizes)
    return [
        np.frombuffer(piece, dtype="<" + spec.dtype).reshape(spec.shape)
        for spec, piece in zip(specs, pieces, strict=True)
    ]


def _cut(frames: list[memoryview], sizes: list[int]) -> Iterator[Frame]:
    """One piece of the joined frames per size, copied only if it spans frames."""
    index, start = 0, 0
    for size in sizes:
        parts: list[memoryview] = []
        while size > 0:
            part = frames[index][start : start + size]
            parts.append(part)
            size -= len(part)
            start += len(part)
            if start == len(frames[index]):
                index, start = index + 1, 0
        yield parts[0] if len(parts) == 1 else b"".join(parts)
