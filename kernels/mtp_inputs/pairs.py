"""Pairs of a hidden state and the id after it, as an MTP head takes them."""

from typing import NamedTuple

from torch import Tensor


class Pairs(NamedTuple):
    """R rows of w pairs; pairs that a row does not have are written to the null block. A draft is
    made of one pair of each row."""

    input_ids: Tensor  # [R * w] int32
    positions: Tensor  # [R * w] int64
    slot_mapping: Tensor  # [R * w] int64: block * block_size + offset that a pair's KV goes to
    starts: Tensor  # [R] int32: the place, within the row, of its first pair
    first_keys: Tensor  # [R] int32: places before it lack their pairs
    lasts: Tensor  # [R] int64: of all R * w pairs those that drafts are made of
    targets: Tensor  # [R] int64: the positions, in the whole sequence, that these drafts are for
    counts: Tensor  # [R] int32: rows with 0 get no draft
