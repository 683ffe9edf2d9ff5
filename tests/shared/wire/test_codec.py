"""Encoding and decoding are inverse; other bytes are refused."""

import contextlib

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import CodecError
from shared.wire import codec
from shared.wire.codec import decode, encode
from shared.wire.messages import (
    Accepted,
    Bye,
    Cancel,
    Failed,
    Generate,
    Heartbeat,
    NewSequence,
    RequestKey,
    SamplingParams,
    State,
    StepPlan,
    TokenRow,
    TokenRun,
    Tokens,
)

NEW = NewSequence("r/0/0")
PLAN = StepPlan(1, [], [], [], [], [])


def as_received(frames: list) -> list[bytes]:
    return [bytes(frame) for frame in frames]


@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=200),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(0, 2),
)
def test_a_message_and_its_array_come_back_equal(ids: list[int], seed: int, temperature: float):
    new = [NewSequence("r/0/0", 0, len(ids))]
    message = Generate("r/0", 1, SamplingParams(seed, temperature), new)
    sent = [np.array(each, np.int32) for each in ([7], ids)]
    decoded, arrays = decode(as_received(encode(message, sent)))
    assert decoded == message
    assert [each.tolist() for each in arrays] == [[7], ids]


def test_the_header_is_plain_msgpack_of_tag_and_fields():
    frames = encode(Accepted("r/0", 2), [np.zeros(3, np.int32)])
    assert msgpack.unpackb(frames[0]) == [[20, "r/0", 2, 0, [0, 0], [], []], [["i4", [3]]]]


def test_trailing_fields_of_a_newer_minor_are_ignored_and_missing_ones_have_defaults():
    newer = msgpack.packb([[3, "farewell", "of a later minor"], []])
    assert decode([newer])[0] == Bye("farewell")
    older = msgpack.packb([[24, "r/0", 2, 503, "type", "code", "message"], []])
    assert decode([older])[0] == Failed("r/0", 2, 503, "type", "code", "message")
    older = msgpack.packb([[2, 1, "", 3, 4], []])
    assert decode([older])[0] == Heartbeat(State.READY, "", 3, 4, 0.0, 0.0, 0.0, None)


@pytest.mark.parametrize("num_ids", [0, 1, 16_383, 16_384, 4 << 20, (4 << 20) + 1, 9 << 20])
def test_arrays_of_any_size_travel_in_frames_of_bounded_size(num_ids: int):
    ids = np.arange(num_ids, dtype=np.int32)
    frames = encode(PLAN, [ids])
    assert max(len(frame) for frame in frames) <= codec.MAX_BODY_FRAME_BYTES
    assert np.array_equal(decode(as_received(frames))[1][0], ids)


def test_a_large_array_is_sent_and_read_without_a_copy():
    ids = np.arange(100_000, dtype=np.int32)
    frames = encode(PLAN, [ids])
    assert np.shares_memory(np.frombuffer(frames[1], np.int32), ids)
    assert np.shares_memory(decode(frames)[1][0], ids)


def test_a_header_above_the_limit_is_refused_by_the_sender():
    with pytest.raises(CodecError, match="4194304"):
        encode(Cancel([RequestKey("x" * codec.MAX_HEADER_BYTES, 1)]))


def test_an_array_of_another_byte_order_is_refused_by_the_sender():
    with pytest.raises(CodecError, match=">i4"):
        encode(PLAN, [np.zeros(3, ">i4")])


HEADER = [[13, 1, [], [], [], [], []], [["i4", [2]]]]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\x91" * 100_000],
        [b"\xff" * (codec.MAX_HEADER_BYTES + 1)],
        [msgpack.packb([[999, 1], []])],
        [msgpack.packb([[3, 7], []])],
        [msgpack.packb([[2, 1], []])],
        [msgpack.packb([[3, b"\xff"], []])],
        [msgpack.packb([HEADER[0], []])],
        [msgpack.packb(HEADER)],
        [msgpack.packb(HEADER), bytes(7)],
        [msgpack.packb(HEADER), bytes(9)],
        [msgpack.packb([HEADER[0], [["i4", [-2]]]]), bytes(8)],
        [msgpack.packb([HEADER[0], [["i4", [1, 2]]]]), bytes(8)],
        [msgpack.packb([HEADER[0], [["f4", [2]]]]), bytes(8)],
        [msgpack.packb([HEADER[0], [["O", [1]]]]), bytes(8)],
        [msgpack.packb([HEADER[0], [["i4", [2**62]]]]), bytes(8)],
        [msgpack.packb([[3, "r"], [["i4", [2]]]]), bytes(8)],
    ],
)
def test_malformed_messages_raise_codec_error(frames: list[bytes]):
    with pytest.raises(CodecError):
        decode(frames)


@given(st.lists(st.binary(max_size=200), max_size=4))
@settings(max_examples=500)
def test_random_bytes_never_raise_anything_else(frames: list[bytes]):
    with pytest.raises(CodecError):
        decode(frames)


@given(st.data())
def test_a_flipped_byte_is_another_message_or_a_codec_error(data: st.DataObject):
    ids, values = np.arange(3, dtype="i4"), np.zeros(6, "f4")
    message = Tokens([TokenRow("r", 1, 0, TokenRun(3, 2))], [])
    frames = as_received(encode(message, [ids, values, ids[:0], ids]))
    header = bytearray(frames[0])
    header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        decode([bytes(header), *frames[1:]])


@pytest.mark.parametrize(
    "message",
    [
        Generate("r/0", -1, SamplingParams(0), [NEW]),
        Generate("r" * 300, 1, SamplingParams(0), [NEW]),
        Generate("r/0", 1, SamplingParams(0), []),
        Generate("r/0", 1, SamplingParams(0), [NewSequence("r/0/0", 2**31)]),
        Generate("r/0", 1, SamplingParams(0), [NEW] * 4097),
        Generate("r/0", 1, SamplingParams(2**63), [NEW]),
        Generate("r/0", 1, SamplingParams(0, temperature=float("nan")), [NEW]),
        Generate("r/0", 1, SamplingParams(0, stop_token_ids=[-1]), [NEW]),
        Generate("r/0", 1, SamplingParams(0, stop_token_ids=[1] * 129), [NEW]),
        Generate("r/0", 1, SamplingParams(0, prompt_logprobs=-2), [NEW]),
    ],
)
def test_numbers_and_names_outside_their_range_are_refused(message: Generate):
    with pytest.raises(CodecError, match=r"Expected|out of range"):
        decode(as_received(encode(message, 2 * [np.zeros(3, np.int32)])))
