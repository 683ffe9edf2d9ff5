"""Copies of slots after a step, for other processes with the same slots."""

import numpy as np

from services.worker.slots.table import SlotTable

NUM_COLUMNS = 4  # before the ids: is_open, num_tokens, num_computed and num_drafts


def copy_width(table: SlotTable) -> int:
    """Number of elements in the copy of a slot."""
    return NUM_COLUMNS + len(_places(table))


def copy_slots(table: SlotTable, slots: np.ndarray) -> np.ndarray:
    """[n, copy_width] int64 of ``slots`` [n]: everything a step may change, its new ids, and the
    drafts after them."""
    nums = table.num_tokens[slots]
    columns = table.is_open[slots], nums, table.num_computed[slots], table.num_drafts[slots]
    ids = table.ids[slots[:, None], _clipped(table, nums)]
    return np.concatenate([np.stack(columns, 1).astype(np.int64), ids], 1)


def paste_slots(table: SlotTable, slots: np.ndarray, copies: np.ndarray) -> None:
    """Overwrites ``slots`` [n] with ``copies`` from a process one step ahead."""
    is_open, nums, num_computed, num_drafts = copies[:, :NUM_COLUMNS].T
    table.is_open[slots] = is_open
    table.num_tokens[slots] = nums
    table.num_computed[slots] = num_computed
    table.num_drafts[slots] = num_drafts
    table.ids[slots[:, None], _clipped(table, nums)] = copies[:, NUM_COLUMNS:]


def _places(table: SlotTable) -> np.ndarray:
    """Indices of the copied ids, relative to the number of known ids: a step adds one token and one
    per draft."""
    most = table.draft_logprobs.shape[1]
    return np.arange(-1 - most, most)


def _clipped(table: SlotTable, nums: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.clip(nums[:, None] + _places(table), 0, table.max_len)
    return found
