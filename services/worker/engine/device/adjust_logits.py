"""What requests ask to be changed in a step's logits that the device does not hold: grammars, bad
words of several ids. The host knows the texts that these depend on, when the results of the steps
before are there."""

from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from kernels.sample import adjust
from services.worker.engine.device.planned_rows import PlannedRows
from services.worker.machine.streams import upload
from services.worker.slots.table import SlotTable
from services.worker.step.sampling import await_grammars, prepare_logits_rules


class Adjusted(NamedTuple):
    logits: Tensor  # [R * width, V]: to draw from
    waiting: Tensor  # [W] int64: rows from which nothing is sampled: grammars are compiled


def adjusted(
    table: SlotTable,
    planned: PlannedRows,
    logits: Tensor,
    width: int,
    eos_ids: np.ndarray,
    has_host_rules: np.ndarray,
) -> Adjusted | None:
    """logits [R * width, V], of R rows or more that ``planned`` has → a copy with the changes of
    those slots that have ``has_host_rules`` [N] bool, if there are any."""
    slots = planned.slots
    nums = np.ones(len(slots), np.int64)  # the token after the last known one, and after drafts
    num_decoding = len(planned.decode_slots)
    nums[:num_decoding] += np.minimum(planned.depths, table.num_drafts[planned.decode_slots])
    await_grammars(table, slots[table.is_open[slots]])
    nums[~(has_host_rules[slots] & table.is_open[slots])] = 0
    rows = np.repeat(np.arange(len(slots)), nums)
    columns = np.arange(len(rows)) - (np.cumsum(nums) - nums)[rows]
    positions = table.num_tokens[slots[rows]] + columns
    adjustments, waiting = prepare_logits_rules(
        *(table, rows * width + columns, slots[rows], positions, eos_ids),
        partial(upload, device=logits.device),
    )
    if adjustments is None and not len(waiting):
        return None
    changed = logits if adjustments is None else adjust(logits, adjustments)
    return Adjusted(changed, upload(waiting, logits.device))
