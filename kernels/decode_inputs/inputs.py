"""The tokens of a step's decode rows as inputs of the model."""

from typing import NamedTuple

from torch import Tensor


class DecodeInputs(NamedTuple):
    """B rows of w tokens; missing tokens of a row are written to the null block."""

    input_ids: Tensor  # [B * w] int32
    positions: Tensor  # [B * w] int64
    # [G, B * w] int64: KV entry of a token in each group, block * block_size + offset
    slot_mapping: Tensor
    starts: Tensor  # [B] int32: the position of the first token
    num_valid: Tensor  # [B] int32: tokens of the row; 0 for a closed slot
    token_slots: Tensor  # [B * w] int32
    next_positions: Tensor  # [B * w] int64: positions of the tokens sampled after each
