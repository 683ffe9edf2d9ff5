"""The rows of a plan with open slots."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from services.worker.slots.table import SlotTable
from shared.wire.messages import StepPlan

# (slots, numbers of tokens, numbers of keys), each [R] int64 → the order of the rows [R].
Order = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class Lengths(Protocol):
    """Lengths of slots when a plan arrives, each [N] int64: exact, or upper bounds if only a device
    knows the exact ones."""

    num_tokens: np.ndarray  # known ids
    num_computed: np.ndarray  # known ids with KV in the cache
    num_drafts: np.ndarray  # after the known ids


class Rows(NamedTuple):
    """R rows. The Q sampling rows reach the last known id and have room for another token. Each
    samples a token after its last known id and one after each of its drafts.

    The first ``num_decoding`` rows decode on a device, and only the device knows their lengths:
    ``starts`` and ``num_drafts`` are upper bounds.
    """

    slots: np.ndarray  # [R] int64
    starts: np.ndarray  # [R] int64: positions of the first tokens
    num_tokens: np.ndarray  # [R] int64
    num_drafts: np.ndarray  # [R] int64: the last tokens
    num_recomputed: np.ndarray  # [R] int64: the first tokens, for their hidden states only
    sampling_rows: np.ndarray  # [Q] int64, indices into R
    num_decoding: int = 0

    @property
    def sampling_slots(self) -> np.ndarray:
        """[Q] int64"""
        slots: np.ndarray = self.slots[self.sampling_rows]
        return slots

    @property
    def ends(self) -> np.ndarray:
        """[R] int64: positions after the last tokens."""
        ends: np.ndarray = self.starts + self.num_tokens
        return ends

    @property
    def token_ends(self) -> np.ndarray:
        """[R] int64: ends of the rows in the flat batch of tokens."""
        ends: np.ndarray = np.cumsum(self.num_tokens)
        return ends

    @property
    def has_chunks(self) -> bool:
        return self.num_decoding < len(self.slots)

    @property
    def chunks(self) -> "Rows":
        """The rows after the first ``num_decoding``: the host knows their lengths."""
        if not self.num_decoding:
            return self
        return self.kept(np.arange(len(self.slots)) >= self.num_decoding)

    @property
    def decoding(self) -> "Rows":
        """The first ``num_decoding`` rows."""
        return self.kept(np.arange(len(self.slots)) < self.num_decoding)

    def kept(self, is_kept: np.ndarray) -> "Rows":
        """The rows that ``is_kept`` [R] bool selects."""
        if is_kept.all():
            return self
        new_places = np.cumsum(is_kept) - 1
        return Rows(
            slots=self.slots[is_kept],
            starts=self.starts[is_kept],
            num_tokens=self.num_tokens[is_kept],
            num_drafts=self.num_drafts[is_kept],
            num_recomputed=self.num_recomputed[is_kept],
            sampling_rows=new_places[self.sampling_rows[is_kept[self.sampling_rows]]],
            num_decoding=int(is_kept[: self.num_decoding].sum()),
        )


def plan_rows(
    table: SlotTable, lengths: Lengths, plan: StepPlan, recomputes_states: bool, order: Order
) -> Rows:
    """Returns the rows of ``plan`` with open slots, in the given ``order``. Raises ValueError if
    the plan has more tokens for a slot than known ids are left to compute.

    ``recomputes_states``: the first row of a sequence with cached ids recomputes the last of these,
    because a drafter needs its hidden state.
    """
    rows = [(row.slot, 1, row.verify_depth) for row in plan.decode]
    rows += [(row.slot, row.num_tokens, 0) for row in plan.prefill]
    slots, num_tokens, num_drafts = np.array(rows, np.int64).reshape(-1, 3).T
    is_open = table.is_open[slots]
    if not is_open.all():
        slots, num_tokens, num_drafts = slots[is_open], num_tokens[is_open], num_drafts[is_open]
    num_known, starts = lengths.num_tokens[slots], lengths.num_computed[slots]
    num_keys = starts + num_tokens
    if (num_keys > num_known).any():
        raise ValueError(f"plan {plan.step} has more tokens for a slot than are left to compute")
    samples = (num_keys == num_known) & (num_known < table.end[slots])
    num_drafts = np.minimum(num_drafts, lengths.num_drafts[slots])
    num_recomputed = (table.lacks_state[slots] & recomputes_states).astype(np.int64)
    num_tokens = num_tokens + num_drafts + num_recomputed
    ordered = order(slots, num_tokens, num_keys + num_drafts)
    return Rows(
        slots=slots[ordered],
        starts=(starts - num_recomputed)[ordered],
        num_tokens=num_tokens[ordered],
        num_drafts=num_drafts[ordered],
        num_recomputed=num_recomputed[ordered],
        sampling_rows=np.flatnonzero(samples[ordered]),
    )


def by_route(table: SlotTable, slots: np.ndarray) -> np.ndarray:
    """Returns the order [Q] of rows in a result: by route of ``slots`` [Q], then by slot."""
    order: np.ndarray = np.lexsort((slots, table.routes[slots]))
    return order
