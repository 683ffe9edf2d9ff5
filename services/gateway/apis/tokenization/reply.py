"""The reply of ``/tokenize`` as JSON, in pieces: a text may have one token for each byte."""

from collections.abc import Callable, Iterator
from typing import Any

from services.gateway.http.json_reply import encode
from services.gateway.mesh.token_table import TokenTable
from shared.wire.codec import Array

PIECE_IDS = 1024


def write_tokens(
    ids: Array, max_model_len: int, table: TokenTable | None, offsets: Array | None = None
) -> Iterator[bytes]:
    """``table`` writes the text of each token; ``offsets`` [2 n] are the positions in the text."""
    yield b'{"count":%d,"max_model_len":%d,"tokens":' % (len(ids), max_model_len)
    yield from _list(ids, lambda some: encode(some)[1:-1])
    yield b',"token_strs":'
    if table is None:
        yield b"null"
    else:
        texts = table.json_texts
        yield from _list(ids, lambda some: b",".join(texts[token_id] for token_id in some))
    if offsets is not None:
        yield b',"token_offsets":'
        yield from write_offsets(offsets)
    yield b"}"


def write_offsets(offsets: Array) -> Iterator[bytes]:
    """[2 n] as a list of n pairs."""
    yield from _list(offsets.reshape(-1, 2), lambda some: encode(some)[1:-1])


def _list(ids: Array, write: Callable[[list[Any]], bytes]) -> Iterator[bytes]:
    yield b"["
    for start in range(0, len(ids), PIECE_IDS):
        yield (b"," if start else b"") + write(ids[start : start + PIECE_IDS].tolist())
    yield b"]"
