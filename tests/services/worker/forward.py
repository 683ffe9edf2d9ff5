"""A forward pass over the paged cache, without an engine."""

from pathlib import Path

import numpy as np
import torch

from services.worker.layers.context import forward_context
from services.worker.machine.kv_cache import KVCache
from services.worker.machine.state_pool import StatePool
from services.worker.models import CausalLM
from services.worker.models.registry import read_model_config
from services.worker.slots.table import SlotTable
from services.worker.startup.choose_backend import choose_kernels
from services.worker.step.batch import Batch, prepare_batch
from services.worker.weights.load import load_model
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Admit, Capacity, Prefill, SamplingParams, StepPlan

CPU = torch.device("cpu")
CAPACITY = Capacity(64, 16, 8, 512, 128)


def prepare(
    folder: Path, prompts: list[list[int]], dtype: torch.dtype, kernels: str = "torch"
) -> tuple[CausalLM, Batch]:
    """The model, and all tokens of ``prompts`` as one step."""
    config = read_model_config(folder)
    loaded = load_model(folder, config, dtype, CPU, lambda text, fraction: None)
    settings = WorkerConfig(
        native_kernels=kernels == "native", num_threads=1, block_size=CAPACITY.block_size
    )
    layouts = loaded.kv_layouts(dtype, drafts=False)
    cache = KVCache(layouts, CAPACITY.num_blocks, CAPACITY.block_size, CPU)
    model, _ = choose_kernels(loaded, settings, dtype)
    table = SlotTable(CAPACITY)
    params = SamplingParams(seed=0)
    tables = np.arange(CAPACITY.num_blocks).reshape(CAPACITY.max_num_seqs, -1).tolist()
    admits = [
        Admit(slot, "r", 0, 0, 0, len(ids), len(ids), 0, params, tables[slot])
        for slot, ids in enumerate(prompts)
    ]
    rows = [Prefill(slot, len(ids)) for slot, ids in enumerate(prompts)]
    plan = StepPlan(1, [], admits, [], rows, [])
    table.apply(plan, np.concatenate([np.array(ids, np.int32) for ids in prompts]))
    states = StatePool(loaded.state_specs(), CAPACITY, CPU)
    states.apply(plan)
    return model, prepare_batch(table, plan, cache, states)


@torch.inference_mode()
def our_logits(
    folder: Path, prompts: list[list[int]], dtype: torch.dtype, kernels: str = "torch"
) -> list[np.ndarray]:
    """Logits after every token of each prompt, all prompts in one step: [len(prompt), V]."""
    model, batch = prepare(folder, prompts, dtype, kernels)
    with forward_context(batch.context):
        hidden = model(batch.input_ids, batch.positions)
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32
    parts = logits.split(batch.rows.num_tokens.tolist())
    by_slot = dict(zip(batch.rows.slots.tolist(), parts, strict=True))
    return [by_slot[slot].numpy() for slot in range(len(prompts))]
