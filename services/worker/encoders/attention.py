"""Attention among the tokens of each prompt, in both directions, for prompts side by side.

transformers finds it by its name, ``ATTENTION``, and passes on the keyword ``lengths``.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "shoal-prompts"


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    lengths: Sequence[int],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, H_kv, T, D] of prompts of ``lengths``, whose sum is T
    → [1, T, H, D]

    Prompts of equal length in a row share a call. The names are transformers'.
    """
    attended = []
    start = 0
    for length, group in groupby(lengths):
        num = len(list(group))
        end = start + num * length
        q, k, v = (
            each[0, :, start:end].unflatten(1, (num, length)).transpose(0, 1)
            for each in (query, key, value)
        )
        if sliding_window is None or length <= sliding_window:
            states = scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=True)
        else:
            states = _attend_near(q, k, v, scaling, sliding_window)
        attended.append(states.transpose(1, 2).flatten(0, 1))
        start = end
    return torch.cat(attended).unsqueeze(0), None


AttentionInterface.register(ATTENTION, attend)


def _attend_near(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int) -> Tensor:
    """[N, H, L, D] → [N, H, L, D]; a token sees the tokens at distances below ``window``."""
    length = q.shape[2]
    places = torch.arange(length, device=q.device)
    attended = []
    for first in range(0, length, window):
        last = min(first + window, length)
        begin, end = max(0, first - window + 1), min(length, last + window - 1)
        is_near = (places[first:last, None] - places[begin:end]).abs() < window
        keys, values = k[:, :, begin:end], v[:, :, begin:end]
        attended.append(
            scaled_dot_product_attention(
                q[:, :, first:last], keys, values, is_near, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(attended, 2)
