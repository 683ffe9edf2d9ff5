"""Drafts and their logprobs as JSON. Pure."""

from collections.abc import Iterable, Iterator

import numpy as np

from services.gateway.chat.replies.logprob_json import PIECE_ENTRIES, numbers
from services.gateway.mesh.drafts import Drafts
from services.gateway.mesh.token_table import Spelling
from shared.wire.messages import MIN_LOGPROB

_BOOLS = (b"false", b"true")


class DraftLogprobs:
    """One object for each draft: how it is written, what its drafter thought of it, whether it was
    right, and the index of the completion token that it was for."""

    def __init__(self, spelling: Spelling) -> None:
        self._entries = spelling.entries

    def write(self, several: Iterable[Drafts]) -> Iterator[bytes]:
        yield b'{"content":['
        separator = b""
        for drafts in several:
            for start in range(0, drafts.num, PIECE_ENTRIES):
                piece = b",".join(self._objects(drafts, slice(start, start + PIECE_ENTRIES)))
                yield separator + piece
                separator = b","
        yield b"]}"

    def _objects(self, drafts: Drafts, part: slice) -> Iterator[bytes]:
        arrays = drafts.arrays
        columns = zip(
            arrays.ids[part].tolist(),
            numbers(np.maximum(arrays.values[part], np.float32(MIN_LOGPROB))),
            arrays.ranks[part].tolist(),
            drafts.are_accepted[part].tolist(),
            drafts.positions[part].tolist(),
            strict=True,
        )
        for token_id, logprob, rank, is_accepted, position in columns:
            yield b'%b%b,"rank":%d,"accepted":%b,"position":%d}' % (
                self._entries[token_id],
                logprob,
                rank,
                _BOOLS[is_accepted],
                position,
            )
