"""Applies the logits rules stored on the device, so that a CUDA graph can contain them: hidden ids,
biases, and penalties of seen ids.

Results equal ``kernels/sample/adjust.py`` bit for bit. ``reference.py`` computes them token by
token; torch serves CPUs, Triton CUDA devices.
"""

import torch
from torch import Tensor

from kernels.dispatch import runs_triton
from kernels.grammar_mask import HIDDEN
from kernels.sample.slot_rules import EMITTED, IN_PROMPT, IS_END
from kernels.slot_state import SlotState


def change_logits(logits: Tensor, state: SlotState, slots: Tensor, positions: Tensor) -> Tensor:
    """logits [S, V] float32 of ``slots`` [S] int32 → changed logits [S, V]; the rows of slots
    without rules are undefined.

    ``positions`` [S] int64 are the sequence positions of the tokens to be sampled. Drafts before
    them count as emitted.
    """
    if runs_triton(logits):
        from kernels.change_logits.triton import launch

        return launch(logits, state, slots, positions)
    changed = torch.empty_like(logits)
    rows = state.rules.is_changed[slots.long()].nonzero()[:, 0]
    if len(rows):
        changed[rows] = _changed(logits[rows], state, slots[rows].long(), positions[rows])
    return changed


def _changed(logits: Tensor, state: SlotState, slots: Tensor, positions: Tensor) -> Tensor:
    rules = state.rules
    seen = rules.seen[slots]
    nums_before = positions - state.num_tokens[slots]
    is_before = torch.arange(state.max_drafts) < nums_before[:, None]
    drafts = state.ids[slots, 1:].where(is_before, 0).long()
    seen.scatter_add_(1, drafts, EMITTED * is_before.int())
    num_emitted = seen // EMITTED
    is_early = (positions < rules.min_ends[slots])[:, None]
    changed = logits + rules.biases[slots]
    changed.masked_fill_(is_early & (seen & IS_END > 0), HIDDEN)
    penalty = rules.repetition_penalty[slots, None]
    factor = torch.where(changed > 0, 1 / penalty, penalty)
    is_known = (seen & IN_PROMPT > 0) | (num_emitted > 0)
    changed = torch.where(is_known, changed * factor, changed)
    frequency = rules.frequency_penalty[slots, None] * num_emitted
    penalties = (rules.presence_penalty[slots, None] + frequency).float()
    return torch.where(num_emitted > 0, changed - penalties, changed)
