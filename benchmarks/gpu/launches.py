"""Compiles a worker's launches without a GPU: everything a worker compiles before it is ready, and
every kernel of the check, in the sizes of the real models."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import kernel_table, read_kernel
from benchmarks.gpu.dry_card import DryDriver, dry_card
from benchmarks.gpu.engine_table import MAX_DEPTH
from benchmarks.gpu.floor import READ_CONFIGS
from benchmarks.gpu.shapes import write_model
from benchmarks.gpu.suite import Suite
from services.worker.backends.torch_lm import TorchLM
from services.worker.engine.device.device_slots import DeviceSlots
from services.worker.engine.device.kernels import choose_device_kernels
from services.worker.engine.device.segments import make_trial_segments
from services.worker.engine.device.warm_up import warm_up
from services.worker.slots.table import SlotTable
from services.worker.startup.loaded_model import load
from shared.settings.worker import WorkerConfig

# Small, to limit compile time on a CPU; kernels do not depend on them.
MAX_NUM_SEQS, MAX_BATCHED_TOKENS = 16, 256
MAX_STACK_BYTES = 8  # two registers, with Triton 3.6 and 3.7


def measure(suite: Suite, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each model and one for the kernels alone. Raises RuntimeError if registers
    spill."""
    with dry_card() as card, torch.inference_mode():
        for name, config in suite.models.items():
            model = write_model(folder / f"launches-{name}", config)
            yield _row(card, f"engine, {name}", partial(_start, suite, model, "mtp" in name))
        yield _row(card, "kernels", partial(_run_cases, suite))


def _row(card: DryDriver, what: str, run: Callable[[], None]) -> dict[str, Any]:
    started_s, num_loaded, num_launches = time.monotonic(), len(card.loaded), card.num_launches
    run()
    fresh = card.loaded[num_loaded:]
    if spilled := [each.name for each in fresh if each.num_stack_bytes > MAX_STACK_BYTES]:
        raise RuntimeError(f"{what}: registers spill in {', '.join(spilled)}")
    return {
        "what": what,
        "compiled": len(fresh),
        "launches": card.num_launches - num_launches,
        "seconds": time.monotonic() - started_s,
    }


def _start(suite: Suite, model: Path, drafts: bool) -> None:
    """Runs a worker's start up to its memory measurement."""
    speculation = {"method": "mtp" if drafts else "none", "num_speculative_tokens": MAX_DEPTH}
    settings = WorkerConfig(
        model=str(model),
        load_format="dummy",
        device="cpu",
        dtype=str(suite.dtype).removeprefix("torch."),
        max_model_len=suite.max_model_len,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        speculative_config=speculation,
    )
    loaded = load(settings, _be_silent, choose_device_kernels)
    assert isinstance(loaded.model, TorchLM)
    assert loaded.model.model.lm_head is not None
    loaded.model.model.lm_head.to(suite.dtype)  # float32 on a CPU, but not on a GPU
    capacity = loaded.limits
    table = SlotTable(capacity)
    state = DeviceSlots(capacity, table, loaded.eos_ids, loaded.device).state
    warm_up(make_trial_segments(loaded, state), table, capacity, _be_silent)


def _run_cases(suite: Suite) -> None:
    for block, num_warps in READ_CONFIGS:
        values = torch.zeros(block, dtype=torch.int32)
        read_kernel.launch(values, values[:1].clone(), block, num_warps)
    for case in kernel_table.cases(suite):
        ours, _ = case.make()
        ours[0]()


def _be_silent(text: str, fraction: float) -> None:
    pass
