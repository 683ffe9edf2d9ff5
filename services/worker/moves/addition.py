"""KV blocks and states that move to other workers, as an addition to a model on a CPU."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeGuard

import numpy as np
import torch
from prometheus_client import Counter

from services.worker.block_layout.layout import (
    digest_of,
    facts_of,
    facts_of_groups,
    is_on_gpu,
    why_not_copied,
)
from services.worker.block_layout.memory import BlockMemory, StateMemory
from services.worker.machine.kv_cache import KVCache
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.moves.inbox import Inbox
from services.worker.startup.additions import PlanPart, States
from services.worker.startup.cache_codes import CACHE_CODES, choose_cache_dtype
from services.worker.startup.model_shape import shape_of
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import MAX_INBOX_BLOCKS, Capacity, Part, Push, StepPlan, Take

log = logging.getLogger(__name__)

INBOX_BYTES, MIN_BLOCKS = 64 << 20, 8
MAX_MESSAGE_BYTES = 16 << 20  # of a Pushed, or one block

PUSHED = Counter("shoal_blocks_pushed_bytes", "Bytes of KV blocks copied for other workers")
TAKEN = Counter("shoal_blocks_taken_bytes", "Bytes of KV blocks of other workers put to use")


def check(settings: WorkerConfig, device: torch.device, *, pools: bool, is_ours: bool) -> None:
    """Moves save time alone: where none is supported, everything is computed."""


def make(
    settings: WorkerConfig, folder: Path, model: DecoderLM, dtype: torch.dtype
) -> "KVTransfer | None":
    why = "the worker is on a GPU" if is_on_gpu(model) else why_not_copied(settings, model)
    if why:
        log.info("kv-transfer: no KV block moves: %s", why)
        return None
    return KVTransfer(settings, folder, model, dtype)


class KVTransfer:
    """``part`` is made when the KV cache is there."""

    operators = None
    part: "TransferPart"

    def __init__(
        self, settings: WorkerConfig, folder: Path, model: DecoderLM, dtype: torch.dtype
    ) -> None:
        self._settings, self._folder, self._dtype = settings, folder, dtype
        codes = CACHE_CODES[choose_cache_dtype(settings.kv_cache_dtype, model.config)]
        shape = shape_of(model, dtype, drafts=model.mtp_head is not None, codes=codes)
        self._block_bytes = settings.block_size * shape.token_bytes
        self._groups = facts_of_groups(model)

    def limit(self, capacity: Capacity) -> Capacity:
        return capacity

    def num_bytes(self, num_tokens: int) -> Mapping[str, int]:
        """The inbox with its guests, and copies on their way to others."""
        num_blocks = inbox_blocks(self._block_bytes)
        num_copies = 2 * num_blocks + guest_blocks(num_blocks)
        return {"KV blocks that move (kv-transfer)": num_copies * self._block_bytes}

    def begin(
        self, model: CausalLM, is_open: np.ndarray, kv_cache: KVCache, states: States
    ) -> "TransferPart":
        memory = BlockMemory(kv_cache.sections)
        copies = StateMemory(*states, num_slots=len(is_open))
        facts = facts_of(self._settings, self._folder, self._dtype, model, kv_cache)
        layout = digest_of(facts, self._groups, states[0])
        num_blocks = inbox_blocks(memory.num_bytes)
        inbox = Inbox(num_blocks, memory.num_bytes, guest_blocks(num_blocks))
        self.part = TransferPart(memory, copies, layout, inbox, kv_cache.block_size)
        return self.part


def inbox_blocks(block_bytes: int) -> int:
    return min(max(MIN_BLOCKS, INBOX_BYTES // block_bytes), MAX_INBOX_BLOCKS)


def guest_blocks(num_blocks: int) -> int:
    """Counts the places for blocks of other cells next to ``num_blocks`` for the own one."""
    return num_blocks // 2


class TransferPart(PlanPart):
    """Copies blocks of ``block_size`` tokens, and pieces of states, as plans say, on the thread of
    the steps. ``on_push`` gets the rows of some blocks for a worker, by the inbox of the plan's
    scheduler, and their bytes."""

    def __init__(
        self, memory: BlockMemory, states: StateMemory, layout: str, inbox: Inbox, block_size: int
    ) -> None:
        self.layout, self.inbox = layout, inbox
        self.num_pieces = -(-states.num_bytes // memory.num_bytes)
        self._memory, self._states, self._block_size = memory, states, block_size
        self.on_push: Callable[[Inbox, list[Push], list[Array]], None]
        self.on_push = lambda inbox, rows, blocks: None

    def use(self, inbox: Inbox) -> None:
        """For later plans, which another scheduler makes."""
        self.inbox = inbox

    def apply(self, plan: StepPlan, pixels: Sequence[Array]) -> None:
        pushed: list[tuple[Push, Array]] = []
        for row in plan.rows:
            if isinstance(row, Push):
                pushed.append((row, self._copy(row)))
            elif isinstance(row, Take):
                self._fill(row, self.inbox.next_taken())
        most = max(1, MAX_MESSAGE_BYTES // self.inbox.block_bytes)
        pushed.sort(key=lambda each: _message_of(each[0]))
        for _, group in groupby(pushed, lambda each: _message_of(each[0])):
            rows, blocks = map(list, zip(*group, strict=True))
            for start in range(0, len(rows), most):
                part = slice(start, start + most)
                self.on_push(self.inbox, rows[part], blocks[part])

    def _copy(self, row: Push) -> Array:
        """The last piece of a state is filled up with zeros."""
        num_bytes = self._memory.num_bytes
        PUSHED.inc(num_bytes)
        content = b"".join(self._pieces(row.block, row.part))
        return np.frombuffer(content.ljust(num_bytes, b"\0"), np.uint8)

    def _fill(self, row: Take, content: Array) -> None:
        TAKEN.inc(self._memory.num_bytes)
        start, view = 0, content.data
        for piece in self._pieces(row.block, row.part):
            piece[:] = view[start : start + len(piece)]
            start += len(piece)
        if is_of_state(row.part):
            self._states.note(row.block, row.part.num_blocks * self._block_size)

    def _pieces(self, block: int, part: Part | None) -> Sequence[memoryview]:
        """The memory of a block, or of a part of a state."""
        if not is_of_state(part):
            return self._memory.pieces(block)
        start = part.number * self._memory.num_bytes
        return [*_between(self._states.pieces(block), start, start + self._memory.num_bytes)]


def is_of_state(part: Part | None) -> TypeGuard[Part]:
    return part is not None and part.group is None


def _message_of(row: Push) -> tuple[str, bool]:
    """A message has the blocks for one worker, all of them parts of keep points or none."""
    return row.worker, row.part is not None


def _between(pieces: Sequence[memoryview], start: int, end: int) -> Iterator[memoryview]:
    """The bytes from ``start`` to ``end`` of all ``pieces``."""
    for piece in pieces:
        if start < len(piece) and end > 0:
            yield piece[max(0, start) : end]
        start, end = start - len(piece), end - len(piece)
