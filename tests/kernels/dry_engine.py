"""A worker's device state on the CPU, with meaningless weights."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.grammar_mask import hide
from services.worker.backends.torch_lm import TorchLM
from services.worker.config.model_config import ModelConfig
from services.worker.engine.device.chunks import prepare_chunks
from services.worker.engine.device.device_slots import DeviceSlots
from services.worker.engine.device.mixed_step import MixedStep
from services.worker.engine.device.segments import Segments
from services.worker.engine.device.stack_experts import stack_experts
from services.worker.engine.device.states import DeviceStatePool
from services.worker.engine.device.steps import DecodeStep
from services.worker.engine.device.warm_up import warm_up
from services.worker.layers.embedding import LMHead, TokenRows
from services.worker.layers.linear import Linear
from services.worker.machine.kv_cache import KVCache
from services.worker.machine.streams import upload
from services.worker.slots.table import SlotTable
from services.worker.startup.model_shape import place_layers, shape_of
from services.worker.step.rows import Rows
from services.worker.step.sampler import Adjusted
from services.worker.weights.load import build_model, quantize
from services.worker.weights.online import Quantization
from shared.wire.messages import Capacity

CPU = torch.device("cpu")
VOCAB_SIZE, MAX_LEN = 32000, 2048
MAX_ROWS, MAX_TOKENS, NUM_BLOCKS = 48, 256, 301


@dataclass
class DryEngine:
    segments: Segments
    table: SlotTable

    def decode(self, num_rows: int, depths: list[int]) -> DecodeStep | MixedStep:
        """Decodes the last slots; the largest of ``depths``, assigned to rows in turn, widens the
        step."""
        slots = np.arange(MAX_ROWS)[-num_rows:].astype(np.int32)
        drafts = np.resize(np.array(depths, np.int32), num_rows)
        rows = upload(slots, CPU), upload(drafts, CPU)
        return DecodeStep(self.segments, *rows, 1 + max(depths), MAX_LEN)

    def mix(self, num_rows: int, depth: int, nums: list[int]) -> DecodeStep | MixedStep:
        """Chunks of ``nums`` tokens; all but the second sample."""
        slots, ints = np.arange(num_rows, dtype=np.int32), np.array(nums)
        chunk_slots = num_rows + np.arange(len(nums))
        starts = 7 * np.arange(len(nums))
        ending = np.delete(np.arange(len(nums)), slice(1, 2))
        planned = Rows(chunk_slots, starts, ints, 0 * ints, 0 * ints, ending)
        chunks = prepare_chunks(self.table, planned, num_rows * (1 + depth), CPU)
        rows = upload(slots, CPU), upload(np.full(num_rows, depth, np.int32), CPU)
        return MixedStep(self.segments, *rows, 1 + depth, MAX_LEN, chunks)

    def run(self, step: DecodeStep | MixedStep, is_adjusted: bool = False) -> None:
        """Runs all of it and ignores the results."""
        logits = step.forward()
        if len(step.slots):
            step.sample_and_accept(_masked(logits) if is_adjusted else None)
        if self.segments.drafts:
            step.draft(self.segments.state.max_drafts)


def _masked(logits: Tensor) -> Adjusted:
    """All rows guided, the first by a grammar that is not compiled."""
    adjusted = logits.clone()
    masks = np.zeros((len(logits) - 1, -(-logits.shape[1] // 32)), np.int32)
    if len(masks):
        hide(adjusted, upload(np.arange(1, len(logits)), CPU), upload(masks, CPU))
    return Adjusted(adjusted, np.zeros(1, np.int64))


def start(
    config: ModelConfig,
    dtype: torch.dtype,
    num_drafts: int,
    block_size: int,
    quantization: Quantization = "none",
    codes: torch.dtype | None = None,
    **changes: Any,
) -> DryEngine:
    """A ready worker's state. The KV cache may be quantized to ``codes``."""
    model = build_model(config, dtype, CPU)
    for module in model.modules():
        if isinstance(module, Linear | TokenRows):
            module.allocate(CPU)
            quantize(module, "none" if isinstance(module, LMHead) else quantization)
    model.lm_head.to(dtype)
    stack_experts(model)
    drafts = model.mtp_head is not None
    limits = (block_size, MAX_ROWS, MAX_TOKENS, MAX_LEN, VOCAB_SIZE, num_drafts)
    place_layers(model, Capacity(0, *limits), drafts=drafts)
    shape = shape_of(model, dtype, drafts=drafts, codes=codes)
    for num_blocks in (0, NUM_BLOCKS):
        capacity = Capacity(num_blocks, *limits, groups=shape.groups)
        table = SlotTable(capacity)
        segments = Segments(
            TorchLM(model),
            DeviceSlots(capacity, table, np.zeros(2, np.int64), CPU).state,
            KVCache(shape.kv_layouts, num_blocks, block_size, CPU, shape.layer_groups),
            DeviceStatePool(shape.state_specs, capacity, CPU, is_trial=not num_blocks),
            torch.zeros(2, dtype=torch.int32),
            drafts=drafts,
            returns_processed=False,
        )
        segments = replace(segments, **changes)
        if not num_blocks:
            warm_up(segments, table, capacity, lambda text, fraction: None)
    return DryEngine(segments, table)
