"""Logprobs of sampled tokens, and of the likeliest tokens or the whole vocabulary.

``reference.py`` computes them row by row in numpy; torch serves every device, and
``kernels/cpu/logprobs.cpp`` CPUs. ``triton.py`` computes up to 20 likeliest tokens within a CUDA
graph.
"""

import torch
from torch import Tensor

from kernels.dispatch import runs_triton
from kernels.logprobs.num_logprobs import MAX_TOP
from kernels.logprobs.row_logprobs import RowLogprobs


def logprobs(
    logits: Tensor, tokens: Tensor, num_top: int | None, ids: Tensor | None = None
) -> RowLogprobs:
    """logits [N, V] float32, tokens [N] int64; the ``num_top`` < V likeliest tokens (None: the
    whole vocabulary), or ``ids`` [N, num_top] int64 instead, in their order."""
    own = logits.gather(1, tokens[:, None])
    others, top_ids = (logits, tokens.new_zeros(len(tokens), 0))
    if ids is not None:
        others, top_ids = logits.gather(1, ids), ids
    elif num_top is not None:
        others, top_ids = _highest(logits, num_top)
    values = torch.cat((own, others), 1).sub_(logits.logsumexp(-1, keepdim=True))
    ranks = (logits > own).sum(-1, dtype=torch.int32) + 1
    return RowLogprobs(values, top_ids.int(), ranks)


def logprobs_slots(
    logits: Tensor, tokens: Tensor, wants: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The values [S, 1 + MAX_TOP], top ids [S, MAX_TOP] and ranks [S] of ``RowLogprobs``.

    logits [S, V] float32 with V ≥ MAX_TOP, tokens [S] int64, ``wants`` [N] int32 by slot, slots [S]
    int32. The row of a slot with NO_LOGPROBS is undefined, and so are the logprob and rank of a
    token < 0.
    """
    if runs_triton(logits):
        from kernels.logprobs import triton

        return triton.logprobs_slots(logits, tokens, wants, slots)
    found = logprobs(logits, tokens.clamp(min=0), MAX_TOP)
    return found.values, found.top_ids, found.ranks


def _highest(logits: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """``topk`` may return any of equal values, so rows with ties at the end are sorted; on a GPU
    all rows, since the test would block the host."""
    if logits.is_cuda:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values[:, :num_top], ids[:, :num_top]
    values, ids = logits.topk(num_top)
    if num_top and bool(((logits >= values[:, -1:]).sum(-1) > num_top).any()):
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values[:, :num_top], ids[:, :num_top]
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
