"""The device's state of each slot, so that a step needs nothing of the previous one from the
host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.logprobs.num_logprobs import NO_LOGPROBS
from kernels.sample.slot_params import SlotParams, device_params
from kernels.sample.slot_rules import SlotRules, no_rules
from kernels.sizes import ALIGNED, cdiv

NO_ID = -1


@dataclass(frozen=True, slots=True)
class SlotState:
    """Arrays over N slots. The last is the null slot, which is never open and belongs to the rows
    that pad a batch. A slot that is not open emits nothing, whatever is computed for it.

    Known ids are the prompt's and the emitted ones; all but the last have their KV in the cache
    when a step decodes. Drafts follow the last known id.
    """

    ids: Tensor  # [N, 1 + max drafts] int32: the last known id, then drafts
    num_tokens: Tensor  # [N] int32: known ids
    num_drafts: Tensor  # [N] int32
    ends: Tensor  # [N] int32: known ids at which the sequence is full
    is_open: Tensor  # [N] int32, 1 or 0
    # [G, N, max_blocks] int32, padded with the null block: one table for each group of layers. Each
    # is contiguous and begins at an aligned place.
    block_tables: Tensor
    sampling: SlotParams[Tensor]
    rules: SlotRules[Tensor]
    ignores_eos: Tensor  # [N] int32, 1 or 0
    stop_ids: Tensor  # [N, max stop ids] int32, padded with NO_ID
    num_logprobs: Tensor  # [N] int32: likeliest tokens to return, or NO_LOGPROBS
    wants_draft_logprobs: (
        Tensor  # [N] int32: 0 if drafts are returned with logprobs, or NO_LOGPROBS
    )
    draft_logprobs: Tensor  # [N, max drafts] float32, of the drafts in ``ids``
    draft_ranks: Tensor  # [N, max drafts] int32
    # For an MTP head: a slot has the pairs of the places [mtp_starts, mtp_ends).
    mtp_starts: Tensor  # [N] int32
    mtp_ends: Tensor  # [N] int32

    @property
    def max_drafts(self) -> int:
        return self.ids.shape[1] - 1


def empty_slots(
    num_slots: int, vocab_size: int, max_drafts: int, num_groups: int, max_blocks: int,
    null_block: int, max_stop_ids: int, device: torch.device,
) -> SlotState:  # fmt: skip
    """``num_slots`` slots and the null slot, all closed."""
    num = num_slots + 1

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    table_size = num * max_blocks
    tables = zeros(num_groups, cdiv(table_size, ALIGNED) * ALIGNED).fill_(null_block)
    stop_ids = zeros(num, max_stop_ids).fill_(NO_ID)
    return SlotState(
        ids=zeros(num, 1 + max_drafts),
        num_tokens=zeros(num).fill_(1),  # so that a padding row has a token
        num_drafts=zeros(num),
        ends=zeros(num),
        is_open=zeros(num),
        block_tables=tables[:, :table_size].view(num_groups, num, max_blocks),
        sampling=device_params(num, device),
        rules=no_rules(num, vocab_size, device),
        ignores_eos=zeros(num),
        stop_ids=stop_ids,
        num_logprobs=zeros(num).fill_(NO_LOGPROBS),
        wants_draft_logprobs=zeros(num).fill_(NO_LOGPROBS),
        draft_logprobs=zeros(num, max(1, max_drafts), dtype=torch.float32),
        draft_ranks=zeros(num, max(1, max_drafts)),
        mtp_starts=zeros(num),
        mtp_ends=zeros(num),
    )
