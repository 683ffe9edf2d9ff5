"""Pairs of a hidden state and the id after it, as inputs of an MTP head."""

from typing import NamedTuple

from torch import Tensor


class Pairs(NamedTuple):
    """R rows of w pairs; missing pairs of a row are written to the null block. A draft is made from
    one pair of each row."""

    input_ids: Tensor  # [R * w] int32
    positions: Tensor  # [R * w] int64
    # [G, R * w] int64: KV entry of a pair in each group, block * block_size + offset
    slot_mapping: Tensor
    starts: Tensor  # [R] int32: the place of a row's first pair
    first_keys: Tensor  # [R] int32: places before it have no pairs
    lasts: Tensor  # [R] int64: the pair of each draft, among all R * w
    targets: Tensor  # [R] int64: the sequence positions of the drafts
    counts: Tensor  # [R] int32: rows with 0 get no draft
