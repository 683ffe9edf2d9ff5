"""What makes drafts: the tokens that a sequence may go on with, for the next step to verify.

Whatever a drafter does, the text stays what it is (see ``verify.py``); a good one makes it faster.
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
    """A step that was recorded: its hidden states [T, hidden], and how many drafts to make of each
    of ``slots`` [N] int64, which emitted something and run on."""

    batch: Batch
    hidden: Tensor
    slots: np.ndarray
    depth: int


class Drafter(Protocol):
    """``recomputes_states``: it wants the state before the first id that a row computes, even where
    that one's KV was cached."""

    recomputes_states: bool

    def begin(self, table: SlotTable, plan: StepPlan, fresh_blocks: np.ndarray) -> None:
        """``plan`` was applied to ``table``; ``fresh_blocks`` [N] int64 have new owners."""

    def draft(self, table: SlotTable, done: RecordedStep) -> None:
        """Puts drafts into ``table``, where the slots that sampled have none: ids behind those that
        are known, and how many."""


class NoDrafter:
    """Makes none; what a drafter without a state of its own need not do."""

    def __init__(self, recomputes_states: bool = False) -> None:
        self.recomputes_states = recomputes_states

    def begin(self, table: SlotTable, plan: StepPlan, fresh_blocks: np.ndarray) -> None:
        pass

    def draft(self, table: SlotTable, done: RecordedStep) -> None:
        pass


def rooms(table: SlotTable, slots: np.ndarray, depth: int) -> np.ndarray:
    """How many drafts each may have [N]: what follows them has to be a token too."""
    nums: np.ndarray = np.clip(table.end[slots] - table.num_tokens[slots] - 1, 0, depth)
    return nums


def agree_on_drafts(table: SlotTable, done: RecordedStep, parallel: Parallel) -> None:
    """Gives all ranks the drafts of the first: a grammar that is compiled on one and not yet on
    another allows other drafts, and the next step must have as many tokens on each."""
    if parallel.size == 1 or not done.depth or not len(done.slots):
        return
    slots = done.slots
    places = np.minimum(table.num_tokens[slots][:, None] + np.arange(done.depth), table.max_len)
    drafts = table.ids[slots[:, None], places]
    own = np.concatenate([table.num_drafts[slots, None], drafts], 1)
    first = parallel.first(torch.from_numpy(own)).numpy()
    table.num_drafts[slots] = first[:, 0]
    table.ids[slots[:, None], places] = first[:, 1:]
