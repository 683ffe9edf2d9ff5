"""The tokens of a step's decode rows, as the model takes them."""

from typing import NamedTuple

from torch import Tensor


class DecodeInputs(NamedTuple):
    """B rows of w tokens; tokens that a row does not have are written to the null block."""

    input_ids: Tensor  # [B * w] int32
    positions: Tensor  # [B * w] int64
    slot_mapping: Tensor  # [B * w] int64: block * block_size + offset that a token's KV goes to
    starts: Tensor  # [B] int32: the position of the first token
    num_valid: Tensor  # [B] int32: the tokens that the row has; 0 of slots that are closed
    token_slots: Tensor  # [B * w] int32
    next_positions: Tensor  # [B * w] int64: of what is sampled after each token
