"""ZMTP as bytes: packed messages are read again for any cut; other bytes are refused."""

import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.link.sockets.zmtp import (
    COMMAND,
    GREETING,
    GREETING_BYTES,
    LONG,
    MAX_FRAMES,
    MIN_LARGE_BYTES,
    MORE,
    ProtocolError,
    Reader,
    handshake,
    pack,
)
from shared.wire.codec import MAX_FRAME_BYTES, MIN_OWN_FRAME_BYTES

SIZES = st.one_of(
    st.integers(0, 300),
    st.sampled_from([255, 256, MIN_LARGE_BYTES - 1, MIN_LARGE_BYTES, MIN_OWN_FRAME_BYTES, 200_000]),
)


def read(reader: Reader, sent: bytes, cuts: list[int] | None = None) -> Iterator[list[bytes]]:
    """The messages in ``sent``, which arrives in pieces of ``cuts`` bytes at most, in turn."""
    left, number = memoryview(sent), 0
    while left:
        space = reader.space()
        size = min(len(space), len(left), cuts[number % len(cuts)] if cuts else len(left))
        space[:size], left, number = left[:size], left[size:], number + 1
        for message in reader.received(size):
            yield [bytes(frame) for frame in message]


def opened() -> Reader:
    reader = Reader("ROUTER")
    assert not list(read(reader, handshake("DEALER")))
    assert reader.is_open
    return reader


@given(
    st.lists(st.lists(SIZES, min_size=1, max_size=5), max_size=5),
    st.lists(st.integers(1, 100_000), min_size=1, max_size=20),
)
def test_packed_frames_are_read_back_in_any_pieces(sizes: list[list[int]], cuts: list[int]):
    cuts = [max(each, 2 + sum(map(sum, sizes)) // 1000) for each in cuts]
    messages = [
        [bytes([7 * number % 256]) * size for number, size in enumerate(each)] for each in sizes
    ]
    sent = handshake("DEALER") + b"".join(piece for message in messages for piece in pack(message))
    assert list(read(Reader("ROUTER"), sent, cuts)) == messages


def test_a_byte_at_a_time_is_read_as_well():
    sent = handshake("DEALER") + b"".join(pack([b"a" * 300, b"", b"b"]))
    assert list(read(Reader("ROUTER"), sent, [1])) == [[b"a" * 300, b"", b"b"]]


def test_large_frames_are_not_copied():
    large = b"x" * MIN_OWN_FRAME_BYTES
    small, piece = pack([b"header", large])
    assert piece.obj is large
    assert len(small) < 20


def test_frames_that_were_read_do_not_change():
    reader = opened()
    (message,) = read(reader, b"".join(pack([b"first"])))
    reader.space()[:] = bytes(len(reader.space()))
    assert message == [b"first"]


READY = handshake("DEALER")[GREETING_BYTES:]
WRONG = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(100),
    "an old version": GREETING[:10] + b"\x02" + GREETING[11:],
    "another mechanism": GREETING[:12] + b"CURVE".ljust(20, b"\0") + GREETING[32:],
    "a message for READY": GREETING + b"\x00\x01a",
    "another command": GREETING + b"\x04\x06\x05ERROR",
    "a socket of another type": GREETING + READY.replace(b"DEALER", b"XXPUBX"),
    "a socket of our type": handshake("ROUTER"),
    "metadata that breaks off": GREETING + bytes((COMMAND, 8)) + b"\x05READY\x0bS",
    "a long READY": GREETING + struct.pack(">BQ", COMMAND | LONG, MIN_LARGE_BYTES),
    "a second READY": GREETING + READY + READY,
    "flags that there are not": GREETING + READY + b"\x08\x00",
    "a frame too long": GREETING + READY + struct.pack(">BQ", LONG, MAX_FRAME_BYTES + 1),
    "a command later": GREETING + READY + struct.pack(">BQ", COMMAND | LONG, MIN_LARGE_BYTES),
    "frames without end": GREETING + READY + bytes((MORE, 0)) * MAX_FRAMES,
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("cuts", [None, [17]])
def test_other_protocols_are_refused(name: str, cuts: list[int] | None):
    with pytest.raises(ProtocolError):
        list(read(Reader("ROUTER"), WRONG[name], cuts))


@given(st.binary(max_size=400))
def test_any_bytes_after_the_handshake_are_messages_or_refused(sent: bytes):
    try:
        for message in read(opened(), sent):
            assert sum(map(len, message)) <= len(sent)
    except ProtocolError:
        pass
