"""Drafters guess the next tokens of a sequence, for the next step to verify.

Drafts never change the output (see ``verify.py``); good ones make it faster.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from services.worker.layers.parallel import Parallel
from services.worker.slots.table import SlotTable
from services.worker.step.batch import Batch
from shared.wire.messages import StepPlan


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step with its hidden states [T, hidden], and the ``depth`` of drafts to make of
    each of ``slots`` [N] int64, which emitted tokens and continue."""

    batch: Batch
    hidden: Tensor
    slots: np.ndarray
    depth: int


class Drafter(Protocol):
    """``recomputes_states``: it needs the hidden state before the first id a row computes, even if
    the KV of that position was cached."""

    recomputes_states: bool

    def begin(self, table: SlotTable, plan: StepPlan, fresh_blocks: np.ndarray) -> None:
        """``plan`` was applied to ``table``; ``fresh_blocks`` [N] int64 have new owners."""

    def draft(self, table: SlotTable, done: RecordedStep) -> None:
        """Writes drafts into ``table``, after the known ids, and their number. Slots that sampled
        have none before."""


class NoDrafter:
    """Makes no drafts; the base of drafters without state."""

    def __init__(self, recomputes_states: bool = False) -> None:
        self.recomputes_states = recomputes_states

    def begin(self, table: SlotTable, plan: StepPlan, fresh_blocks: np.ndarray) -> None:
        pass

    def draft(self, table: SlotTable, done: RecordedStep) -> None:
        pass


def rooms(table: SlotTable, slots: np.ndarray, depth: int) -> np.ndarray:
    """The most drafts of each slot [N]: a sampled token must fit after them."""
    nums: np.ndarray = np.clip(table.end[slots] - table.num_tokens[slots] - 1, 0, depth)
    return nums


def agree_on_drafts(table: SlotTable, done: RecordedStep, parallel: Parallel) -> None:
    """Gives all ranks the drafts of the first: a grammar compiled on one rank and not yet on
    another allows other drafts, and the next step must have equally many tokens on each."""
    if parallel.size == 1 or not done.depth or not len(done.slots):
        return
    slots = done.slots
    places = np.minimum(table.num_tokens[slots][:, None] + np.arange(done.depth), table.max_len)
    drafts = table.ids[slots[:, None], places]
    own = np.concatenate([table.num_drafts[slots, None], drafts], 1)
    first = parallel.first(torch.from_numpy(own)).numpy()
    table.num_drafts[slots] = first[:, 0]
    table.ids[slots[:, None], places] = first[:, 1:]
