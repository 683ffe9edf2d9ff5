"""A rank without memory for a graph; no module of transformers, which take ranks seconds."""

from unittest.mock import patch

import torch

from services.worker.engine.device.graphs import Shape, StepGraphs
from services.worker.engine.device.recorders import on_all_ranks
from services.worker.engine.device.steps import Record, Run


def short_of_memory(rank: int) -> None:
    """The second rank has no memory for graphs of four sequences, and captures like a GPU: runs the
    work first, then captures it alone."""
    record_step = StepGraphs.record

    def record(graphs: StepGraphs, shape: Shape, record: Record) -> None:
        def capture(run: Run) -> Run:
            recorded = record(run)
            with on_all_ranks(graphs._segments.parallel):
                if rank == 1 and shape.num_rows == 4:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
            return recorded

        record_step(graphs, shape, capture)

    patch.object(StepGraphs, "record", record).start()
