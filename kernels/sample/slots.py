"""Samples with parameters that the device holds by slot, so that a CUDA graph can hold it.

The host need not know which rows are greedy or which filters they ask for. ``triton.py`` serves
CUDA devices, ``sample`` CPUs. All tensors are contiguous.
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
    """Token ids [S] int64 drawn from ``adjusted`` [S, V] float32, or where slots are changed from
    ``changed``. ``adjusted`` may be ``logits`` itself; these may be of some tokens only [S, W].

    ``slots`` [S] int32, ``positions`` [S] int64: the drawn token's index in the whole sequence. In
    place of a token NOT_FINITE where the row of ``logits`` float32 has a NaN or an infinity,
    or NOTHING_LEFT where all of ``adjusted`` is −inf.
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
    """logits [S, V] float32, adjusted, or where slots are changed those of ``changed`` → the scores
    that are drawn from; what is filtered is −inf.

    Greedy rows are as they were.
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
