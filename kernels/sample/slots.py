"""Samples with parameters stored on the device by slot, so that a CUDA graph can contain it.

The host need not know the greedy rows or their filters. ``triton.py`` serves CUDA devices,
``sample`` CPUs. All tensors are contiguous.
"""

import torch
from torch import Tensor

from kernels.dispatch import runs_triton
from kernels.sample import checked, process, sample
from kernels.sample.rows import RandomRows, prepare_random_rows
from kernels.sample.slot_params import COLUMNS, SlotParams
from kernels.sample.slot_rules import Changed


def sample_slots(
    logits: Tensor,
    adjusted: Tensor,
    params: SlotParams[Tensor],
    slots: Tensor,
    positions: Tensor,
    changed: Changed | None = None,
) -> Tensor:
    """Token ids [S] int64 sampled from ``adjusted`` [S, V] float32, or from ``changed`` for slots
    with rules. ``adjusted`` may be ``logits`` itself, and these may cover only the first tokens [S,
    W].

    ``slots`` [S] int32, ``positions`` [S] int64: the sampled token's index in the whole sequence. A
    row has NOT_FINITE in place of a token if its ``logits`` float32 have a NaN or an infinity, or
    NOTHING_LEFT if all of ``adjusted`` is −inf.
    """
    if runs_triton(logits):
        from kernels.sample import triton

        return triton.sample_slots(logits, adjusted, params, slots, positions, changed)
    random = _random_rows(params, slots, positions)
    drawn = _drawn(adjusted, slots, changed)
    return checked(sample(drawn, random), logits, drawn)


def process_slots(
    logits: Tensor, params: SlotParams[Tensor], slots: Tensor, changed: Changed | None = None
) -> Tensor:
    """Adjusted logits [S, V] float32, or those of ``changed`` for slots with rules → the scores to
    draw from; filtered tokens are −inf.

    Greedy rows are unchanged.
    """
    if runs_triton(logits):
        from kernels.sample import triton

        return triton.process_slots(logits, params, slots, changed)
    random = _random_rows(params, slots, torch.zeros_like(slots))
    return process(_drawn(logits, slots, changed), random)


def _drawn(adjusted: Tensor, slots: Tensor, changed: Changed | None) -> Tensor:
    if changed is None:
        return adjusted
    return torch.where(changed.is_changed[slots, None] > 0, changed.logits, adjusted)


def _random_rows(params: SlotParams[Tensor], slots: Tensor, positions: Tensor) -> RandomRows | None:
    columns = zip(params, COLUMNS, strict=True)
    taken = SlotParams(
        *(values[slots].numpy().astype(each.host, copy=False) for values, each in columns)
    )
    return prepare_random_rows(taken, positions.long().numpy(), slots.device)
