"""What requests ask to be changed in a step's logits: penalties, biases, ids that are allowed. The
host knows the texts that these depend on, when the results of the steps before are there."""

from functools import partial

import numpy as np
from torch import Tensor

from kernels.sample import adjust, prepare_adjustments
from services.worker.engine.device.planned_rows import PlannedRows
from services.worker.machine.streams import upload
from services.worker.slots.table import SlotTable
from services.worker.step.batch import row_changes


def adjusted(
    table: SlotTable, planned: PlannedRows, logits: Tensor, width: int, eos_ids: np.ndarray
) -> Tensor | None:
    """logits [R * width, V], of R rows or more that ``planned`` has → a copy with the changes, if
    there are any."""
    slots = planned.slots
    nums = np.ones(len(slots), np.int64)  # the token after the last known one, and after drafts
    num_decoding = len(planned.decode_slots)
    nums[:num_decoding] += np.minimum(planned.depths, table.num_drafts[planned.decode_slots])
    nums[~(table.has_logits_rules[slots] & table.is_open[slots])] = 0
    rows = np.repeat(np.arange(len(slots)), nums)
    columns = np.arange(len(rows)) - (np.cumsum(nums) - nums)[rows]
    positions = table.num_tokens[slots[rows]] + columns
    changes = row_changes(table, rows * width + columns, slots[rows], positions, eos_ids)
    adjustments = prepare_adjustments(changes, partial(upload, device=logits.device))
    return None if adjustments is None else adjust(logits, adjustments)
