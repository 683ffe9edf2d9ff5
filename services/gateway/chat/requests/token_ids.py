"""Token ids from clients, as arrays."""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from msgspec import Raw

from services.gateway.chat.requests.json_body import json_errors, plain
from services.gateway.chat.requests.json_list import is_list, items, typed
from services.gateway.chat.requests.schema import TokenId
from services.gateway.http.violations import show
from shared.errors import InvalidRequest
from shared.wire.codec import Array
from shared.wire.messages import ModelInfo

PARSE_CHUNK_BYTES = 64 << 10
"""The part of a list converted to Python integers at a time, while the GIL is held."""

_PIECE = msgspec.json.Decoder(list[TokenId])


@json_errors()
def read_ids(raw: Raw, model: ModelInfo, param: str, is_cut: bool = False) -> Array:
    """[n] int32 of the list in ``param``. Raises InvalidRequest for values other than ids of the
    model, and for more ids than the context holds, unless the list ``is_cut`` later; these are
    counted first."""
    if not is_list(raw):
        raise InvalidRequest(f"{param} is {show(plain(raw))}; expected a list of ids", param=param)
    text = memoryview(raw)[1:-1]
    num = sum(piece.count(b",") + 1 for piece in _pieces(text))
    if not is_cut:
        check_length(num, model, param)
    ids, num_read, start = np.empty(num, np.int32), 0, 0
    try:
        for piece in _pieces(text):
            some = _PIECE.decode(b"[%b]" % piece)
            ids[num_read : num_read + len(some)] = some
            num_read += len(some)
            start += len(piece) + 1
    except msgspec.DecodeError:
        _find_wrong(Raw(b"[%b]" % bytes(text[start:])), param, num_read)
        raise
    return known_ids(ids[:num_read], model.vocab_size, param)


def _find_wrong(rest: Raw, param: str, num_before: int) -> None:
    """Raises InvalidRequest for the first item of the list that is not an id."""

    def check(number: int, value: Raw) -> None:
        typed(value, TokenId, f"{param}[{num_before + number}]")

    items(rest, param, memoryview(rest).nbytes, check)


def check_length(num: int, model: ModelInfo, param: str) -> None:
    """Raises InvalidRequest."""
    if num > model.max_model_len:
        raise InvalidRequest(
            f"{param} has {num} ids; the limit is max-model-len = {model.max_model_len}",
            param=param,
            code="context_length_exceeded",
        )


def known_ids(ids: Sequence[int] | Array, vocab_size: int, param: str) -> Array:
    """[n] int32. Raises InvalidRequest for an id that the model does not have."""
    array = np.asarray(ids, dtype=np.int32)
    outside = np.flatnonzero(array >= vocab_size)
    if outside.size:
        param, value = f"{param}[{outside[0]}]", array[outside[0]]
        raise InvalidRequest(f"{param} is {value}; token ids are below {vocab_size}", param=param)
    return array


def _pieces(text: memoryview) -> Iterator[bytes]:
    """The text between the brackets, cut at commas."""
    start = 0
    while start < len(text):
        size = PARSE_CHUNK_BYTES
        piece = bytes(text[start : start + size])
        while start + size < len(text) and b"," not in piece:
            size *= 2
            piece = bytes(text[start : start + size])
        if start + size < len(text):
            piece = piece[: piece.rfind(b",")]
        yield piece
        start += len(piece) + 1
