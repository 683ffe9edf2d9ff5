"""Drafts by prompt lookup: the ids that followed an earlier occurrence of the last ids.

Saxena, "Prompt Lookup Decoding", 2023: edited, summarised or quoted texts repeat themselves, which
needs no model to see.
"""

import numpy as np

from services.worker.slots.table import SlotTable
from services.worker.speculation.drafter import NoDrafter, RecordedStep, rooms


class NgramDrafter(NoDrafter):
    """Looks up the last ``max_len`` … ``min_len`` ids, longest first, at their latest earlier
    occurrence. Ids forced by a guide take precedence. The drafter counts a draft as certain: its
    logprob is 0."""

    def __init__(self, min_len: int, max_len: int) -> None:
        super().__init__()
        self._lengths = range(max_len, min_len - 1, -1)

    def draft(self, table: SlotTable, done: RecordedStep) -> None:
        if done.depth:
            self.look_up(table, done.slots, done.depth)

    def look_up(self, table: SlotTable, slots: np.ndarray, depth: int) -> None:
        """Makes up to ``depth`` drafts of each of ``slots`` [N]."""
        nums = rooms(table, slots, depth)
        for slot, room in zip(slots.tolist(), nums.tolist(), strict=True):
            num = table.num_tokens[slot]
            guide = table.guide_of(slot)
            forced = guide.forced()[:room] if guide is not None else []
            found = np.array(forced) if forced else self._continue(table.ids[slot, :num], room)
            table.ids[slot, num : num + len(found)] = found
            table.num_drafts[slot] = len(found)
            table.draft_logprobs[slot, : len(found)] = 0.0
            table.draft_ranks[slot, : len(found)] = 1

    def _continue(self, ids: np.ndarray, num: int) -> np.ndarray:
        """Up to ``num`` ids after the occurrence."""
        text = ids.tobytes()
        for length in self._lengths:
            if length < len(ids):
                end = _find_last(text, length * ids.itemsize, ids.itemsize)
                if end is not None:
                    return ids[end // ids.itemsize :][:num]
        return ids[:0]


def _find_last(text: bytes, length: int, itemsize: int) -> int | None:
    """The end of the last earlier occurrence of the last ``length`` bytes of ``text``."""
    wanted = text[-length:]
    end = len(text) - 1
    while (start := text.rfind(wanted, 0, end)) >= 0:
        if start % itemsize == 0:
            return start + length
        end = start + length - 1
    return None
