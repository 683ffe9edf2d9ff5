"""Decides which sampled tokens are emitted, and updates the slots accordingly.

A draft is accepted if it equals the token sampled in its position. The token sampled after the
accepted drafts is therefore the token that would have been sampled without drafts.

``rule.py`` is the rule, used on CPUs; ``reference.py`` computes it row by row; ``triton.py`` serves
CUDA devices.
"""

import torch
from torch import Tensor

from kernels.accept.output import RETRIED, RUNS, AcceptOutput
from kernels.accept.rule import accept_rows
from kernels.dispatch import runs_triton
from kernels.random_bits import PURPOSE_ACCEPT, random_bits
from kernels.sample.slot_rules import EMITTED
from kernels.slot_state import SlotState


def accept(
    state: SlotState,
    slots: Tensor,
    num_valid: Tensor,
    tokens: Tensor,
    eos_ids: Tensor,
    acceptance: Tensor | None = None,
) -> AcceptOutput:
    """Accepts drafts and updates ids, num_tokens, num_drafts, is_open and the rules of ``slots``.

    ``tokens`` [R, w] int64 were sampled for ``slots`` [R] int32: one after the last known id and
    one after each draft. The first ``num_valid`` [R] int32 of each row are valid; a negative value
    is an error code (``kernels.sample``). A slot occurs once, except the null slot.
    ``eos_ids`` [E] int32. ``acceptance`` [1] float32, for measurements only: drafts are accepted
    with this probability, drawn from separate random bits.
    """
    if runs_triton(slots):
        from kernels.accept.triton import launch

        return launch(state, slots, num_valid, tokens, eos_ids, acceptance)
    return accept_on_cpu(state, slots, num_valid, tokens, eos_ids, acceptance)


def accept_on_cpu(
    state: SlotState,
    slots: Tensor,
    num_valid: Tensor,
    tokens: Tensor,
    eos_ids: Tensor,
    acceptance: Tensor | None,
) -> AcceptOutput:
    slots = slots.long()
    width = tokens.shape[1]
    drafts = state.ids[slots, 1:width]  # [R, w - 1]
    is_right = (
        drafts == tokens[:, :-1]
        if acceptance is None
        else _accepted_at_random(state, slots, tokens, acceptance)
    )
    is_eos = (tokens[:, :, None] == eos_ids).any(2) & (state.ignores_eos[slots, None] == 0)
    is_stop = (tokens[:, :, None] == state.stop_ids[slots, None]).any(2) & (tokens >= 0)
    rooms = state.ends[slots] - state.num_tokens[slots]
    rows = (tokens, num_valid, is_right, is_eos | is_stop, rooms)
    accepted = accept_rows(*(each.numpy() for each in rows))
    num_emitted, num_accepted, codes = map(torch.from_numpy, accepted)
    _update(state, slots, tokens, num_emitted, codes)
    columns = torch.stack((num_emitted, num_accepted, codes, num_valid), 1)
    is_valid = torch.arange(width) < num_valid[:, None]
    packed = torch.cat((columns, tokens.where(is_valid, 0), drafts), 1).int()
    return AcceptOutput(num_emitted.int(), packed)


def _update(
    state: SlotState, slots: Tensor, tokens: Tensor, num_emitted: Tensor, codes: Tensor
) -> None:
    last = tokens.gather(1, (num_emitted - 1).clamp(min=0).long()[:, None])[:, 0]
    state.ids[slots, 0] = torch.where(num_emitted > 0, last.int(), state.ids[slots, 0])
    state.num_tokens[slots] = (state.num_tokens[slots] + num_emitted).int()
    state.num_drafts[slots] = 0
    is_noted = torch.arange(tokens.shape[1]) < num_emitted[:, None]
    is_noted = is_noted & (state.rules.is_changed[slots, None] > 0)
    state.rules.seen.index_put_(
        (slots[:, None].expand_as(tokens), tokens.where(is_noted, 0)),
        EMITTED * is_noted.int(),
        accumulate=True,
    )
    goes_on = (codes == RUNS) | (codes == RETRIED)
    state.is_open[slots] = state.is_open[slots] * goes_on.int()


def _accepted_at_random(
    state: SlotState, slots: Tensor, tokens: Tensor, acceptance: Tensor
) -> Tensor:
    """[R, w - 1] bool, drawn from the random bits of the drafts' positions."""
    columns = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    positions = state.num_tokens[slots, None] + columns
    drawn = random_bits(
        state.sampling.seeds[slots, None], torch.zeros_like(positions), positions,
        state.sampling.choices[slots, None].long(), PURPOSE_ACCEPT,
    )  # fmt: skip
    return (drawn >> 8).float() * 2.0**-24 < acceptance
