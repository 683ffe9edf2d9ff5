"""Steps on a device; the host reads their arrays after the device has computed them."""

import numpy as np
from torch import Tensor

from kernels.accept.output import (
    CLOSED,
    CODE,
    NUM_ACCEPTED,
    NUM_EMITTED,
    NUM_VALID,
    TOKENS,
    AcceptOutput,
)
from kernels.accept.rule import Accepted
from services.worker.engine.device.mixed_step import MixedStep
from services.worker.engine.device.steps import DecodeStep
from services.worker.machine.streams import Download
from services.worker.slots.table import SlotTable
from services.worker.step.rows import Rows, by_route
from services.worker.step.sampler import Adjusted
from services.worker.step.step import Places, Sampled
from services.worker.step.verify import NO_TOKEN, AcceptOutcome


class DeviceComputation:
    """A step of ``rows``, as recorded graphs or eager."""

    def __init__(self, table: SlotTable, step: DecodeStep | MixedStep, rows: Rows) -> None:
        self.step = step
        self._table = table
        self._rows = rows

    def forward(self) -> Tensor:
        return self.step.forward()

    def places(self) -> Places:
        table, slots = self._table, self._rows.sampling_slots
        num_drafts = self._rows.num_drafts[self._rows.sampling_rows]
        nums = 1 + np.minimum(num_drafts, table.num_drafts[slots])
        nums[~table.is_open[slots]] = 0
        owners = np.repeat(np.arange(len(slots)), nums)
        columns = np.arange(len(owners)) - (np.cumsum(nums) - nums)[owners]
        positions = table.num_tokens[slots[owners]] + columns
        return Places(owners * self.step.width + columns, slots[owners], positions)

    def sample(self, adjusted: Adjusted | None) -> Sampled:
        output = self.step.sample_and_accept(adjusted)
        return Sampled(
            tokens=output.tokens.flatten(),
            scores=output.scores,
            acceptance=DeviceAcceptance(output.accepted, len(self._rows.sampling_rows)),
            narrow=output.logprobs,
        )

    def chunk_states(self) -> Tensor:
        assert isinstance(self.step, MixedStep)
        return self.step.hidden[self.step.num_decoded :]


class DeviceAcceptance:
    """Acceptance of the first ``num`` rows of ``output``; rows after these pad a graph. All rows
    have the width of the widest."""

    def __init__(self, output: AcceptOutput, num: int) -> None:
        self._packed = Download(output.packed[:num])
        self._num = num
        self._width = output.drafts.shape[1] + 1

    def candidates(self) -> tuple[np.ndarray, np.ndarray]:
        rows = np.arange(self._num * self._width)
        return rows, rows // self._width

    def read(self, table: SlotTable, rows: Rows) -> tuple[Rows, AcceptOutcome]:
        packed = self._packed.wait()[0].astype(np.int64)
        is_open = table.is_open[rows.slots]
        is_open[rows.sampling_rows] &= packed[:, CODE] != CLOSED
        kept = np.flatnonzero(is_open[rows.sampling_rows])
        kept = kept[by_route(table, rows.sampling_slots[kept])]
        computed = _as_computed(table, rows, packed)
        computed = computed._replace(sampling_rows=rows.sampling_rows[kept])
        return computed.kept(is_open), self._outcome(packed[kept], kept * self._width)

    def _outcome(self, packed: np.ndarray, first_logits: np.ndarray) -> AcceptOutcome:
        end = TOKENS + self._width
        tokens, drafts = packed[:, TOKENS:end], packed[:, end:]
        is_draft = np.arange(self._width - 1) < packed[:, NUM_VALID, None] - 1
        accepted = Accepted(packed[:, NUM_EMITTED], packed[:, NUM_ACCEPTED], packed[:, CODE])
        drafts = np.where(is_draft, drafts, NO_TOKEN)
        return AcceptOutcome.of(tokens, drafts, accepted, first_logits)


def _as_computed(table: SlotTable, rows: Rows, packed: np.ndarray) -> Rows:
    """Returns ``rows`` with the true lengths of decode rows, the first rows of ``packed``."""
    num = rows.num_decoding
    starts, num_drafts, num_tokens = (
        each.copy() for each in (rows.starts, rows.num_drafts, rows.num_tokens)
    )
    starts[:num] = table.num_computed[rows.slots[:num]]
    num_tokens[:num] = packed[:num, NUM_VALID]
    num_drafts[:num] = num_tokens[:num] - 1
    return rows._replace(starts=starts, num_tokens=num_tokens, num_drafts=num_drafts)
