"""Records all graphs of a worker when it starts."""

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from services.worker.engine.device.graphs import Shape, StepGraphs
from services.worker.engine.device.recorders import (
    CpuRecorder,
    CudaRecorder,
    without_garbage_collection,
)
from services.worker.engine.device.segments import Segments
from services.worker.engine.device.steps import Record
from services.worker.engine.device.trunk_graphs import TrunkGraphs, TrunkShape
from services.worker.machine.hardware import read_memory, why_out_of_memory
from services.worker.startup.plan_memory import mib
from services.worker.weights.progress import Progress
from shared.wire.messages import Capacity

log = logging.getLogger(__name__)


class WantedGraphs(NamedTuple):
    """Shapes of each kind, the largest first."""

    steps: Sequence[Shape] = ()
    trunks: Sequence[TrunkShape] = ()

    @property
    def shapes(self) -> list[Shape | TrunkShape]:
        """All shapes, in the order of recording."""
        return [*self.steps, *self.trunks]


class Graphs(NamedTuple):
    steps: StepGraphs
    trunks: TrunkGraphs

    def record(self, shape: Shape | TrunkShape, record: Record) -> None:
        """Raises torch.OutOfMemoryError, and ConfigError if it cannot be recorded."""
        if isinstance(shape, TrunkShape):
            self.trunks.record(shape, record)
        else:
            self.steps.record(shape, record)


def make_graphs(segments: Segments, wanted: WantedGraphs, capacity: Capacity) -> Graphs:
    """Returns graphs with room for the ``wanted`` shapes; no shape is recorded yet."""
    limits = capacity.max_num_seqs, capacity.max_model_len
    return Graphs(
        StepGraphs(segments, wanted.steps, *limits), TrunkGraphs(segments, wanted.trunks, *limits)
    )


@torch.inference_mode()
def record_graphs(
    segments: Segments, wanted: WantedGraphs, capacity: Capacity, progress: Progress
) -> Graphs:
    """Records the ``wanted`` graphs as far as the memory of all ranks allows, and logs them."""
    device, shapes = segments.eos_ids.device, wanted.shapes
    graphs = make_graphs(segments, wanted, capacity)
    is_cuda = device.type == "cuda"
    record = CudaRecorder(device, segments.parallel) if is_cuda else CpuRecorder()
    started_s, free = time.perf_counter(), read_memory(device).free
    with without_garbage_collection():
        for index, shape in enumerate(shapes):
            progress("capturing CUDA graphs", index / len(shapes))
            try:
                graphs.record(shape, record)
            except torch.OutOfMemoryError as error:
                why = why_out_of_memory(error)
                log.warning("CUDA graphs: none for %s, which run eagerly: %s", shape, why)
    if is_cuda:
        torch.cuda.empty_cache()  # memory of the recorder's stream, which is not used again
    if shapes:
        seconds, taken = time.perf_counter() - started_s, free - read_memory(device).free
        num_kinds = len(graphs.steps) + len(graphs.trunks)
        figures = num_kinds, record.num_recorded, seconds, mib(taken)
        log.info("CUDA graphs: %d kinds of steps, %d graphs, %.1f s, %s", *figures)
    return graphs
