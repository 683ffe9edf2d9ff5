"""Which of the sampled tokens are emitted, and what that changes in the slots.

A draft is accepted if it is the token that was sampled in its position, so the token sampled after
the accepted drafts is the one that would have been sampled without drafts.
``reference.py`` computes it row by row; torch serves CPUs, Triton CUDA devices.
"""

import torch
from torch import Tensor

from kernels.accept.output import CLOSED, FULL, RETRIED, RUNS, STOPPED, AcceptOutput
from kernels.dispatch import runs_triton
from kernels.random_bits import PURPOSE_ACCEPT, random_bits
from kernels.sample import NOT_COMPILED, NOT_FINITE
from kernels.slot_state import SlotState


def accept(
    state: SlotState,
    slots: Tensor,
    num_valid: Tensor,
    tokens: Tensor,
    eos_ids: Tensor,
    acceptance: Tensor | None = None,
) -> AcceptOutput:
    """``tokens`` [R, w] int64 were sampled for ``slots`` [R] int32, of which the first
    ``num_valid`` [R] int32 count: the token after the last known id, and after each draft. Below 0
    is what is wrong with a token.

    Changes ids, num_tokens, num_drafts and is_open of the slots, each of which occurs once (except
    the null slot). ``eos_ids`` [E] int32. ``acceptance`` [1] float32: for measurements, the share
    of drafts that count as right, by random bits of their own.
    """
    if runs_triton(slots):
        from kernels.accept.triton import launch

        return launch(state, slots, num_valid, tokens, eos_ids, acceptance)
    return accept_with_torch(state, slots, num_valid, tokens, eos_ids, acceptance)


def accept_with_torch(
    state: SlotState,
    slots: Tensor,
    num_valid: Tensor,
    tokens: Tensor,
    eos_ids: Tensor,
    acceptance: Tensor | None,
) -> AcceptOutput:
    slots = slots.long()
    width = tokens.shape[1]
    columns = torch.arange(width, dtype=torch.int32, device=tokens.device)
    is_valid = columns < num_valid[:, None]  # [R, w]
    drafts = state.ids[slots, 1:width]  # [R, w - 1]
    is_right = (
        drafts == tokens[:, :-1]
        if acceptance is None
        else _accepted_at_random(state, slots, tokens, acceptance)
    )
    num_right = (is_right & is_valid[:, 1:]).int().cumprod(1).sum(1)
    is_wrong = (tokens < 0) & is_valid
    num_good = _first(is_wrong, columns)
    first = tokens[:, 0]
    is_retried = ((first == NOT_FINITE) & (num_valid > 1)) | (first == NOT_COMPILED)
    is_eos = (tokens[:, :, None] == eos_ids).any(2) & (state.ignores_eos[slots, None] == 0)
    is_stop = (tokens[:, :, None] == state.stop_ids[slots, None]).any(2) & (tokens >= 0)
    num_to_end = _first((is_eos | is_stop) & is_valid, columns) + 1
    rooms = state.ends[slots] - state.num_tokens[slots]
    num_emitted = torch.stack((1 + num_right, num_good, num_to_end, rooms)).amin(0)
    is_there = num_valid > 0
    num_emitted = torch.where(is_there, num_emitted, 0)
    fails = (num_good == 0) & ~is_retried
    codes = torch.where(rooms == num_emitted, FULL, RUNS)
    codes = torch.where(num_to_end == num_emitted, STOPPED, codes)
    codes = torch.where(fails, first, codes)
    codes = torch.where(is_retried, RETRIED, codes)
    codes = torch.where(is_there, codes, CLOSED)
    _update(state, slots, tokens, num_emitted, codes)
    num_accepted = torch.minimum(num_right, num_emitted)
    columns = torch.stack((num_emitted, num_accepted, codes, num_valid), 1)
    packed = torch.cat((columns, tokens.where(is_valid, 0), drafts), 1).int()
    return AcceptOutput(num_emitted.int(), packed)


def _update(
    state: SlotState, slots: Tensor, tokens: Tensor, num_emitted: Tensor, codes: Tensor
) -> None:
    last = tokens.gather(1, (num_emitted - 1).clamp(min=0).long()[:, None])[:, 0]
    state.ids[slots, 0] = torch.where(num_emitted > 0, last.int(), state.ids[slots, 0])
    state.num_tokens[slots] = (state.num_tokens[slots] + num_emitted).int()
    state.num_drafts[slots] = 0
    goes_on = (codes == RUNS) | (codes == RETRIED)
    state.is_open[slots] = state.is_open[slots] * goes_on.int()


def _first(flags: Tensor, columns: Tensor) -> Tensor:
    """The first true column of each row [R, w], or one beyond what a row may have."""
    return torch.where(flags, columns, len(columns) + 1).amin(1)


def _accepted_at_random(
    state: SlotState, slots: Tensor, tokens: Tensor, acceptance: Tensor
) -> Tensor:
    """[R, w - 1] bool, by the random bits of the positions that the drafts are for."""
    columns = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    positions = state.num_tokens[slots, None] + columns
    drawn = random_bits(
        state.sampling.seeds[slots, None], torch.zeros_like(positions), positions,
        state.sampling.choices[slots, None].long(), PURPOSE_ACCEPT,
    )  # fmt: skip
    return (drawn >> 8).float() * 2.0**-24 < acceptance
