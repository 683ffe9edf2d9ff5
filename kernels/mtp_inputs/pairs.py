"""Pairs of a hidden state and the id after it, as an MTP head takes them."""

from typing import NamedTuple

from torch import Tensor


class Pairs(NamedTuple):
    """R rows of w pairs; pairs that a row does not have are written to the null block."""

    input_ids: Tensor  # [R * w] int32
    positions: Tensor  # [R * w] int64
    slot_mapping: Tensor  # [R * w] int64: block * block_size + offset that a pair's KV goes to
    starts: Tensor  # [R] int32: the place, within the row, of its first pair
    first_keys: Tensor  # [R] int32: places before it lack their pairs
