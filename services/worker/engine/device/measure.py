"""Measures the memory of a model's largest steps on a GPU by running them."""

from collections.abc import Sequence

import torch

from services.worker.engine.device.device_slots import DeviceSlots
from services.worker.engine.device.graphs import Shape
from services.worker.engine.device.out_of_memory import REMEDIES
from services.worker.engine.device.record_graphs import WantedGraphs, make_graphs
from services.worker.engine.device.recorders import CudaRecorder, without_garbage_collection
from services.worker.engine.device.segments import Segments, make_trial_segments
from services.worker.engine.device.trunk_graphs import TrunkShape
from services.worker.engine.device.warm_up import warm_up
from services.worker.machine.hardware import read_memory, why_out_of_memory
from services.worker.slots.table import SlotTable
from services.worker.startup.loaded_model import LoadedModel
from services.worker.startup.plan_memory import LOGPROB_BYTES, MemoryRequirements, requirements_with
from services.worker.step.logprobs import MAX_LOGITS_AT_ONCE
from services.worker.weights.progress import Progress
from shared.errors import ConfigError

MIN_SLACK_BYTES, SLACK_SHARE = 256 << 20, 0.02  # of the GPU's memory; not measured yet


@torch.inference_mode()
def measure(loaded: LoadedModel, wanted: WantedGraphs, progress: Progress) -> MemoryRequirements:
    """Runs the steps over a cache with only the null block, and captures the first and the last of
    each kind of graph. All memory is freed afterwards.

    Raises ConfigError if the memory does not suffice.
    """
    capacity = loaded.limits
    table = SlotTable(capacity)
    slots = DeviceSlots(capacity, table, loaded.eos_ids, loaded.device)
    segments = make_trial_segments(loaded, slots.state)
    try:
        warm_up(segments, table, capacity, progress, loaded.pooler)
        of_step = _num_used(loaded)
        of_graphs = _measure_graphs(loaded, segments, wanted, progress)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"max-num-batched-tokens: a step of {capacity.max_num_batched_tokens} tokens and"
            f" {capacity.max_num_seqs} sequences does not fit in memory with the weights:"
            f" {why_out_of_memory(error)}; {REMEDIES}"
        ) from None
    requirements = requirements_with(loaded, 0)
    pieces = MAX_LOGITS_AT_ONCE * LOGPROB_BYTES  # of wide logprobs and prompt logprobs
    del slots, segments
    torch.cuda.empty_cache()
    slack = max(MIN_SLACK_BYTES, int(loaded.before.total * SLACK_SHARE))
    return requirements_with(loaded, of_step - requirements.weights + pieces, of_graphs, slack)


def _num_used(loaded: LoadedModel) -> int:
    """Bytes taken since before the weights were loaded, torch's cached memory included."""
    torch.cuda.synchronize()
    return loaded.before.free - read_memory(loaded.device).free


def _measure_graphs(
    loaded: LoadedModel, segments: Segments, wanted: WantedGraphs, progress: Progress
) -> int:
    """Bytes of all graphs. Smaller ones share the largest one's memory and add their own size."""
    if not wanted.shapes:
        return 0
    num_bytes, before = 0, _num_used(loaded)
    graphs = make_graphs(segments, wanted, loaded.limits)
    recorder = CudaRecorder(loaded.device, loaded.parallel)
    samples = _samples(wanted.steps) + _samples(wanted.trunks)
    with without_garbage_collection():
        for shape, num_alike in samples:
            progress("measuring CUDA graphs", 0.0)
            graphs.record(shape, recorder)
            used = _num_used(loaded)
            num_bytes += (used - before) * num_alike
            before = used
    return num_bytes


def _samples(
    shapes: Sequence[Shape] | Sequence[TrunkShape],
) -> list[tuple[Shape | TrunkShape, int]]:
    """The first and the last shape, each with the number of shapes it represents."""
    return [(shapes[0], 1), (shapes[-1], len(shapes) - 1)] if shapes else []
