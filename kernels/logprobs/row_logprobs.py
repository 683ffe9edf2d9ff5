"""Logprobs of the rows of a step."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """N rows: the sampled token, then the K likeliest or requested ids, or the whole vocabulary if
    there are no ids."""

    values: Tensor  # [N, 1 + num_top or 1 + V] float32, the sampled token first
    top_ids: Tensor  # [N, num_top or 0] int32; the likeliest in descending order, ties by lowest id
    ranks: Tensor  # [N] int32, of the sampled tokens: 1 + the number of likelier tokens
