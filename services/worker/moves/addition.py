"""KV blocks that move to other workers, as an addition to a model on a CPU."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from prometheus_client import Counter

from services.worker.block_layout import BlockMemory, digest_of, facts_of, why_not_copied
from services.worker.machine.kv_cache import KVCache
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.moves.inbox import Inbox
from services.worker.startup.additions import PlanPart
from services.worker.startup.cache_codes import CACHE_CODES, choose_cache_dtype
from services.worker.startup.model_shape import shape_of
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import EVERY_LAYER, MAX_INBOX_BLOCKS, Capacity, Push, StepPlan, Take

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
    if why := why_not_copied(settings, model) or _why_not_moved(model):
        log.info("kv-transfer: no KV block moves: %s", why)
        return None
    return KVTransfer(settings, folder, model, dtype)


def _why_not_moved(model: DecoderLM) -> str:
    if model.groups != EVERY_LAYER:
        return "the model has layers with windows"
    return "the model has layers with states" if model.state_specs() else ""


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

    def limit(self, capacity: Capacity) -> Capacity:
        return capacity

    def num_bytes(self, num_tokens: int) -> Mapping[str, int]:
        """The inbox with its guests, and copies on their way to others."""
        num_blocks = inbox_blocks(self._block_bytes)
        num_copies = 2 * num_blocks + guest_blocks(num_blocks)
        return {"KV blocks that move (kv-transfer)": num_copies * self._block_bytes}

    def begin(
        self, model: CausalLM, is_open: np.ndarray, kv_cache: KVCache, *_: object
    ) -> "TransferPart":
        memory = BlockMemory(kv_cache.sections)
        facts = facts_of(self._settings, self._folder, self._dtype, model, kv_cache)
        num_blocks = inbox_blocks(memory.num_bytes)
        inbox = Inbox(num_blocks, memory.num_bytes, guest_blocks(num_blocks))
        self.part = TransferPart(memory, digest_of(facts), inbox)
        return self.part


def inbox_blocks(block_bytes: int) -> int:
    return min(max(MIN_BLOCKS, INBOX_BYTES // block_bytes), MAX_INBOX_BLOCKS)


def guest_blocks(num_blocks: int) -> int:
    """Counts the places for blocks of other cells next to ``num_blocks`` for the own one."""
    return num_blocks // 2


class TransferPart(PlanPart):
    """Copies blocks as plans say, on the thread of the steps. ``on_push`` gets the copies of some
    blocks for a worker, by the inbox of the plan's scheduler: their keys and bytes."""

    def __init__(self, memory: BlockMemory, layout: str, inbox: Inbox) -> None:
        self.layout, self.inbox = layout, inbox
        self._memory = memory
        self.on_push: Callable[[Inbox, str, list[bytes], list[Array]], None]
        self.on_push = lambda inbox, worker, keys, blocks: None

    def use(self, inbox: Inbox) -> None:
        """For later plans, which another scheduler makes."""
        self.inbox = inbox

    def apply(self, plan: StepPlan, pixels: Sequence[Array]) -> None:
        pushed: dict[str, tuple[list[bytes], list[Array]]] = {}
        for row in plan.rows:
            if isinstance(row, Push):
                keys, blocks = pushed.setdefault(row.worker, ([], []))
                keys.append(row.key)
                blocks.append(self._copy(row.block))
            elif isinstance(row, Take):
                self._fill(row.block, self.inbox.next_taken())
        most = max(1, MAX_MESSAGE_BYTES // self.inbox.block_bytes)
        for worker, (keys, blocks) in pushed.items():
            for start in range(0, len(keys), most):
                part = slice(start, start + most)
                self.on_push(self.inbox, worker, keys[part], blocks[part])

    def _copy(self, block: int) -> Array:
        PUSHED.inc(self._memory.num_bytes)
        return np.frombuffer(b"".join(self._memory.pieces(block)), np.uint8)

    def _fill(self, block: int, content: Array) -> None:
        TAKEN.inc(self._memory.num_bytes)
        start, view = 0, content.data
        for piece in self._memory.pieces(block):
            piece[:] = view[start : start + len(piece)]
            start += len(piece)
