"""Logprobs of drawn tokens, of the likeliest tokens, or of the whole vocabulary.

``reference.py`` says the same row by row in numpy; torch serves every device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows are worked on in pieces of so many logits, so that the temporaries stay small.
PIECE_LOGITS = 1 << 22


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Of N rows; each has the ``num_top`` likeliest tokens, or, with ``top_ids`` None, all."""

    own: Tensor  # [N] float32, of the drawn tokens
    ranks: Tensor  # [N] int32, 1 + the number of likelier tokens
    values: Tensor  # [N, num_top or V] float32
    top_ids: Tensor | None  # [N, num_top] int32, descending, of equal ones the lowest first


def logprobs(logits: Tensor, tokens: Tensor, num_top: int | None) -> RowLogprobs:
    """logits [N, V] float32, tokens [N] int64; ``num_top`` None: the whole vocabulary."""
    piece = max(1, PIECE_LOGITS // logits.shape[-1])
    parts = [
        _piece(logits[start : start + piece], tokens[start : start + piece], num_top)
        for start in range(0, len(logits), piece)
    ]
    return RowLogprobs(
        torch.cat([part.own for part in parts]),
        torch.cat([part.ranks for part in parts]),
        torch.cat([part.values for part in parts]),
        None if num_top is None else torch.cat([part.top_ids for part in parts]),  # type: ignore[misc]
    )


def _piece(logits: Tensor, tokens: Tensor, num_top: int | None) -> RowLogprobs:
    scale = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, tokens[:, None])
    ranks = (logits > own).sum(-1, dtype=torch.int32) + 1
    if num_top is None:
        return RowLogprobs((own - scale)[:, 0], ranks, logits - scale, None)
    values, ids = _highest(logits, num_top)
    return RowLogprobs((own - scale)[:, 0], ranks, values - scale, ids.int())


def _highest(logits: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """``topk`` takes any of equal ones, so where there are such at the end all are sorted."""
    if num_top == 0:
        return logits[:, :0], torch.zeros_like(logits[:, :0], dtype=torch.int64)
    values, ids = logits.topk(num_top)
    is_ambiguous = (logits >= values[:, -1:]).sum(-1) > num_top
    if bool(is_ambiguous.any()):
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values[:, :num_top], ids[:, :num_top]
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
