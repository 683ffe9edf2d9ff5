"""The model of the simulator: each token is a hash of the adapter, the images and all ids before
it, and each block is checked for the ids and images that its KV was computed from."""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from msgspec.structs import replace

from benchmarks.harness.step_engine import StepEngine
from services.scheduler.scheduler import Planned
from services.worker.engine.protocol import StepOutput
from shared.wire.codec import Array
from shared.wire.envelope import read_options
from shared.wire.messages import (
    Capacity,
    Copied,
    ModelInfo,
    Part,
    ResultRow,
    RunKind,
    StepPlan,
    TokenRun,
)
from shared.wire.token_arrays import Layout, TokenArrays, join
from tests.services.scheduler.moves.moving_worker import Content, Inboxed, MovingWorker, Pushed
from tests.services.scheduler.simulated_worker import Slot
from tests.services.scheduler.stores.storing_worker import SimulatedStore, StoringWorker
from tests.sim.images import PLACEHOLDER, SimulatedMedia

STOP = 251
"""Every so many tokens a text ends by itself."""
STEP_S = 2e-3
LOAD_S = 1e-4  # of a place of a store
NUM_ADDED, ADDED_EVERY = 3, 16
"""One in so many tokens is an added one of the embedded model."""


def token_of(seed: int, ids: list[int], vocab_size: int) -> int:
    number = crc32(np.array([seed % 2**31, *ids], np.int32).tobytes())
    return number % (NUM_ADDED if number % ADDED_EVERY == 0 else vocab_size)


def seed_of(slot: Slot) -> int:
    """With an adapter a text is another one."""
    return slot.admit.params.seed + crc32(adapter_of(slot).encode())


def adapter_of(slot: Slot) -> str:
    return read_options(slot.admit.options).adapter


def arrays_of(token: int, position: int, vocab_size: int, num: int | None) -> TokenArrays:
    """The buffers of one token whose request asked for ``num`` logprobs."""
    ids = np.array([token], np.int32)
    if num is None:
        return TokenArrays(ids)
    top_ids = (token + np.arange(num, dtype=np.int32)) % vocab_size
    values = -(np.float32(1 + position % 7) + np.arange(1 + num, dtype=np.float32) / 8)
    return TokenArrays(ids, values, top_ids, np.array([1 + token % 5], np.int32))


@dataclass
class _Worker(MovingWorker, StoringWorker):
    """Drafts of three in four tokens are right."""

    def _fill(self, plan: StepPlan, block: int, part: Part | None, content: Content) -> None:
        super()._fill(plan, block, part, content)
        if part is None or part.group is not None:
            self.group_of[block] = 0 if part is None else part.group or 0

    def _draft(self, slot: Slot, num: int) -> None:
        ids, vocab_size = list(slot.ids), self.capacity.vocab_size
        for _ in range(min(num, self._num_left(slot) - 1)):
            right = token_of(seed_of(slot), ids, vocab_size)
            ids.append(right if len(ids) % 4 else (right + 1) % vocab_size)
        slot.drafts = ids[len(slot.ids) :]


class SimulatedEngine(StepEngine):
    """Checks every plan. ``fails_next``: memory runs out in the next step. ``adapters`` are there
    for sequences, a bounded number of different ones at once. Blocks are saved in its ``own`` store
    and loaded from ``stores``, and spilled to its ``disk`` and fetched from ``disks``; ``copied``
    has the answers by step. ``pushed`` are blocks for other workers, by step; each reset begins
    with one of ``next_inboxes``. Results report ``step_s``, by which workers seem to differ in
    speed."""

    def __init__(
        self,
        model_info: ModelInfo,
        capacity: Capacity,
        own: SimulatedStore | None = None,
        stores: dict[str, SimulatedStore] | None = None,
        num_pieces: int = 0,
        disk: SimulatedStore | None = None,
        disks: dict[str, SimulatedStore] | None = None,
    ) -> None:
        self.own, self.stores = own, stores or {}
        self.disk, self.disks = disk, disks or {}
        self._num_pieces = num_pieces
        self.copied: dict[int, Copied] = {}
        self.pushed: dict[int, list[Pushed]] = {}
        self.next_inboxes: deque[Inboxed] = deque([Inboxed()])
        self.model_info = model_info
        self.capacity = capacity
        self.fails_next = False
        self.step_s = STEP_S
        self.adapters: Collection[str] = ()
        self.media = SimulatedMedia()
        self.additions = [self.media]
        self.reset()

    @property
    def num_running(self) -> int:
        return sum(not slot.has_finished for slot in self.worker.slots.values())

    def reset(self) -> None:
        self.media.table.reset()
        self.worker = _Worker(
            self.capacity,
            STOP,
            write=self._write,
            own=self.own,
            stores=self.stores,
            disk=self.disk,
            disks=self.disks,
            byte_s=LOAD_S / (1 << 20),
            inbox=self.next_inboxes.popleft(),
            num_pieces=self._num_pieces,
        )

    def submit(
        self,
        plan: StepPlan,
        ids: np.ndarray,
        output: Future[StepOutput],
        pixels: Sequence[Array] = (),
    ) -> None:
        output.set_result(self.step(plan, self.media.seen(plan, ids, pixels)))

    def _write(self, slot: Slot) -> int:
        return token_of(seed_of(slot), slot.ids, self.capacity.vocab_size)

    def step(self, plan: StepPlan, ids: np.ndarray) -> StepOutput:
        if self.fails_next:
            raise MemoryError("out of memory in a step")
        for admit in plan.admit:
            adapter = read_options(admit.options).adapter
            assert not adapter or adapter in self.adapters, "a sequence without its adapter"
        result, emitted = self.worker.step(Planned(plan, ids))
        self.copied |= {each.step: each for each in self.worker.answers}
        self.worker.answers.clear()
        self.pushed[plan.step], self.worker.pushed = self.worker.pushed, []
        held = {adapter_of(slot) for slot in self.worker.slots.values()} - {""}
        assert len(held) <= self.capacity.max_adapters, "too many adapters at once"
        for number, slot in self.worker.slots.items():
            self.media.note_computed(number, slot.num_computed)
        if self.capacity.whole_media:
            slots = self.worker.slots.items()
            self.media.check_whole(plan, {number: slot.num_computed for number, slot in slots})
        layout = Layout(result.rows, emitted)
        num_left: Counter[int] = Counter()
        for row in result.rows:
            num_left[row.slot] += row.run.num_tokens * (row.run.kind == RunKind.OUTPUT)
        rows, parts = [], []
        for index, row in enumerate(result.rows):
            ids = layout.part(index, index + 1).ids
            own: list[int] = np.where(ids < 0, PLACEHOLDER, ids).tolist()
            part = self._arrays(row, own, num_left)
            rows.append(replace(row, run=_widened(row.run, part)))
            parts.append(part)
        result = replace(result, rows=rows, step_s=self.step_s * result.num_steps)
        return result, join(parts) if parts else TokenArrays()

    def _arrays(self, row: ResultRow, ids: list[int], num_left: Counter[int]) -> TokenArrays:
        slot, vocab_size = self.worker.slots[row.slot], self.capacity.vocab_size
        params, prompt_len = slot.admit.params, slot.admit.prompt_len
        if row.run.kind == RunKind.PROMPT:
            num, first = params.prompt_logprobs, slot.num_prompt_scored - len(ids) + 1
        else:
            num, first = params.logprobs, len(slot.ids) - num_left[row.slot] - prompt_len
            num_left[row.slot] -= len(ids)
        each = [arrays_of(token, at, vocab_size, num) for at, token in enumerate(ids, first)]
        return join(each) if each else TokenArrays()


def _widened(run: TokenRun, part: TokenArrays) -> TokenRun:
    num = max(1, run.num_tokens)
    return replace(run, num_values=len(part.values) // num, num_top_ids=len(part.top_ids) // num)
