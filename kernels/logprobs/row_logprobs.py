"""Logprobs of the rows of a step."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """N rows: the sampled token, then the K likeliest or those asked for, or with K = 0 ids the
    whole vocabulary."""

    values: Tensor  # [N, 1 + num_top or 1 + V] float32, first the sampled token's own
    top_ids: (
        Tensor  # [N, num_top or 0] int32; the likeliest: descending, of equals the lowest first
    )
    ranks: Tensor  # [N] int32, of the sampled tokens: 1 + the number of likelier ones
