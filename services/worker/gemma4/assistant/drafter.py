"""Drafts by an assistant model (https://ai.google.dev/gemma/docs/mtp).

From the last known token and the model's state of the token before, after the last norm, the
assistant predicts the next token. For the next draft its own output takes the place of the state,
and the draft that of the token.

**KV.** The assistant writes none. All drafts of a step have the position of the last known token
and attend to the model's keys up to the token before it, in layers with a window to the ones that
the token before it sees: rejected drafts have none of these places, and blocks that were given back
neither.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.worker.layers.context import ForwardContext, forward_context
from services.worker.slots.table import SlotTable
from services.worker.speculation.drafter import RecordedStep
from services.worker.speculation.mtp import Drafts, MtpDrafter
from services.worker.step.batch import make_context
from shared.wire.messages import StepPlan


@dataclass(frozen=True, slots=True)
class _Round:
    """The common inputs of all drafts of N sequences after one step."""

    context: ForwardContext
    positions: Tensor  # [N] int64


class AssistantDrafter(MtpDrafter):
    recomputes_states = False
    _round: _Round

    def begin(self, table: SlotTable, plan: StepPlan, fresh_blocks: np.ndarray) -> None:
        pass

    def catch_up(self, table: SlotTable, done: RecordedStep) -> Tensor:
        return done.hidden

    def start(self, table: SlotTable, drafts: Drafts) -> None:
        drafts.state = self.head.first_state(drafts.out)
        self._round = self._begin_round(table, drafts)
        self.go_on(table, drafts)

    def go_on(self, table: SlotTable, drafts: Drafts) -> None:
        assert drafts.state is not None
        device = drafts.out.device
        places = np.minimum(table.num_tokens[drafts.slots] + drafts.num - 1, table.max_len)
        ids = torch.from_numpy(table.ids[drafts.slots, places]).to(device)
        with forward_context(self._round.context):
            joined = self.head.forward(drafts.state, ids, self._round.positions)
        sizes = [drafts.state.shape[1], joined.shape[1] - drafts.state.shape[1]]
        drafts.state, drafts.out = (each.contiguous() for each in joined.split(sizes, 1))

    def _begin_round(self, table: SlotTable, drafts: Drafts) -> _Round:
        slots, last = drafts.slots, table.num_tokens[drafts.slots] - 1
        context = make_context(
            table=table,
            slots=slots,
            num_tokens=np.ones(len(slots), np.int64),
            num_keys=last,
            slot_mapping=table.slot_mapping(slots, last - 1),
            kv_cache=self.kv_cache,
        )
        return _Round(context, torch.from_numpy(last).to(drafts.out.device))
