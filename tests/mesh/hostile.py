"""Invalid messages: every field at odd values, or with flipped bits."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from shared.wire.codec import ArraySpec
from shared.wire.messages import Message

ODD_INTS = (
    -(2**63),
    -(2**31),
    -5,
    -1,
    0,
    1,
    2,
    7,
    300,
    5000,
    99_999_999,
    2**31 - 1,
    2**31,
    2**64 - 1,
)
ODD_FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-300, 1e308)
ODD_TEXTS = ("", "x" * 3_000_000, "a\r\nb\x1b[31m", "a/b/c", "r~1/0/" + "9" * 200, "stop", "ids")
ODD_THINGS: tuple[object, ...] = (None, [], {}, "text", 1.5, -1)


@dataclass(frozen=True)
class Odd:
    """Frames, and their oddity."""

    name: str
    frames: list[bytes]


def odd_versions(message: Message, arrays: list[np.ndarray]) -> Iterator[Odd]:
    """``message`` with one field or one array changed, for each of them and each odd value."""
    kind = type(message).__name__
    plain = _plain(message)
    for path, value in _paths(plain, ()):
        for odd in _odd_values(value):
            label = repr(odd)[:40]
            yield Odd(f"{kind}{list(path)} = {label}", _frames(_changed(plain, path, odd), arrays))
    for index, array in enumerate(arrays):
        for label, odd in _odd_arrays(array):
            changed = [*arrays[:index], odd, *arrays[index + 1 :]]
            yield Odd(f"{kind} array {index}: {label}", _frames(plain, changed))
    yield Odd(f"{kind} without arrays", _frames(plain, []))


def with_turned_bits(message: Message, arrays: list[np.ndarray], dice: random.Random) -> Odd:
    frames = [bytearray(frame) for frame in _frames(_plain(message), arrays)]
    flipped = []
    for _ in range(dice.choice((1, 1, 1, 2, 8))):
        frame = dice.randrange(len(frames))
        if frames[frame]:
            bit = dice.randrange(8 * len(frames[frame]))
            frames[frame][bit // 8] ^= 1 << bit % 8
            flipped.append((frame, bit))
    return Odd(f"{type(message).__name__} bits {flipped}", [bytes(frame) for frame in frames])


def _plain(message: Message) -> Any:
    """Lists and scalars, and the fields of rows that travel undecoded."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


def _frames(plain: Any, arrays: list[np.ndarray]) -> list[bytes]:
    specs = [ArraySpec(array.dtype.str.lstrip("<|"), list(array.shape)) for array in arrays]
    header = msgspec.msgpack.encode([plain, specs])
    body = b"".join(array.tobytes() for array in arrays)
    return [header, body] if body else [header]


def _paths(value: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """All nested values by path; without the tag of the message."""
    if path:
        yield path, value
    if isinstance(value, list | tuple):
        for index, each in enumerate(value):
            if path or index:
                yield from _paths(each, (*path, index))


def _changed(value: Any, path: tuple[int, ...], odd: Any) -> Any:
    if not path:
        return odd
    index = path[0]
    return [*value[:index], _changed(value[index], path[1:], odd), *value[index + 1 :]]


def _odd_values(value: Any) -> tuple[Any, ...]:
    match value:
        case bool():
            return (not value, 7, None)
        case int():
            return (*ODD_INTS, None)
        case float():
            return (*ODD_FLOATS, None)
        case str():
            return (*ODD_TEXTS, None)
        case list() | tuple():
            doubled = [*value, *value]
            return ([], doubled, [*value, *[1] * 3000], [[]], [-1], [99_999_999], list(value[1:]))
        case _:
            return (*ODD_THINGS, [99_999_999], 0, 5, 2**31 - 1)


def _odd_arrays(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    yield "empty", array[:0]
    yield "doubled", np.concatenate([array, array])
    yield "cut", array[:-1]
    yield "of another kind", np.zeros(len(array), np.uint8 if array.dtype != np.uint8 else np.int32)
    yield "5000 more", np.concatenate([array, np.ones(5000, array.dtype)])
    odd = (math.nan, math.inf) if array.dtype == np.float32 else (-5, 99_999_999, 2**31 - 1)
    if array.dtype != np.uint8 and len(array):
        for value in odd:
            changed = array.copy()
            changed[-1] = value
            yield f"ends with {value}", changed
