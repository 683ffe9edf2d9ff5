"""Step results of a given size."""

from typing import NamedTuple

import numpy as np

from shared.wire.codec import encode
from shared.wire.messages import ResultRow, StepResult, TokenRun
from shared.wire.token_arrays import TokenArrays

WIDE_ROWS, WIDE_DRAFTS = 512, 5


class Step(NamedTuple):
    """A worker's step result: message and arrays."""

    result: StepResult
    arrays: TokenArrays

    @property
    def num_wire_bytes(self) -> int:
        """Bytes including the header."""
        return sum(map(len, encode(*self)))


def step_of(num_bytes: int) -> Step:
    """Up to 32 rows, each a token with logprobs; the arrays have ``num_bytes``, rounded down to
    equal rows."""
    num_rows = 32 if num_bytes > 32 * 64 else 1
    num = num_bytes // (4 * num_rows) - 2
    return _step(num_rows, num - num // 2, num // 2)


def wide_step(num_logprobs: int) -> Step:
    """512 rows of six tokens, five of them drafts, with ``num_logprobs`` each: with 21 this was the
    largest message of a queue with 802,840 bytes for it."""
    return _step(WIDE_ROWS, num_logprobs, num_logprobs - 1, WIDE_DRAFTS)


def _step(num_rows: int, num_values: int, num_top_ids: int, num_drafts: int = 0) -> Step:
    num_each = 1 + num_drafts
    rows = [
        ResultRow(
            slot,
            f"{slot:032x}/0/0",
            1,
            TokenRun(
                num_each, num_values, num_top_ids, num_drafts=num_drafts, num_accepted=num_drafts
            ),
        )
        for slot in range(num_rows)
    ]
    num_tokens = num_rows * num_each
    ids = np.arange(num_tokens, dtype=np.int32)
    values = np.zeros(num_tokens * num_values, np.float32)
    top_ids = np.zeros(num_tokens * num_top_ids, np.int32)
    return Step(StepResult(1, rows), TokenArrays(ids, values, top_ids, ids))
