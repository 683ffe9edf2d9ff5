"""Steps that only decode, as CUDA graphs: the host replays hundreds of kernels with one call.

There is one set of graphs for each number of rows and each number of tokens of a row: one, as many
as the most drafts want, and two where few sequences run. A step takes the next larger set; rows too
many are nobody's, and drafts too many are masked.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

from services.worker.device.segments import Segments
from services.worker.device.steps import DecodeStep, Record, Run
from services.worker.device.streams import ALIGNED, upload
from services.worker.hardware import read_memory, why_out_of_memory
from services.worker.memory import mib
from services.worker.progress import Progress
from shared.messages import Capacity

log = logging.getLogger(__name__)

# Up to so many rows a step with one draft has graphs of its own: with more rows a sequence mostly
# drafts nothing or as much as it may, and each set takes time and memory.
MAX_ROWS_OF_ONE_DRAFT = 32


class Shape(NamedTuple):
    num_rows: int
    width: int  # tokens of a row


def shapes(sizes: Sequence[int], max_rows: int, max_tokens: int, max_drafts: int) -> list[Shape]:
    """Those to record, the largest first: they need most memory, which the others then share.

    None has more than ``max_tokens``, which no step has.
    """
    found = {
        Shape(num_rows, 1 + depth)
        for num_rows in {min(size, max_rows) for size in sizes}
        for depth in {0, max_drafts, min(max_drafts, num_rows <= MAX_ROWS_OF_ONE_DRAFT)}
    }
    fitting = [shape for shape in found if shape.num_rows * shape.width <= max_tokens]
    return sorted(fitting, reverse=True)


class StepGraphs:
    """Decode steps of several shapes, recorded, that run with any slots."""

    def __init__(
        self, segments: Segments, wanted: Sequence[Shape], max_rows: int, max_keys: int
    ) -> None:
        """``wanted`` are the shapes that may be recorded, of ``max_rows`` at most."""
        device = segments.eos_ids.device
        self._segments = segments
        self._max_keys = max_keys
        self._device = device
        self._null_slot = len(segments.state.is_open) - 1
        # Slots and depths of the rows, for all shapes in the same place.
        self._rows = np.zeros((2, -(-max_rows // ALIGNED) * ALIGNED), np.int32)
        self._rows[0] = self._null_slot
        self._inputs = upload(self._rows, device)
        max_tokens = max((shape.num_rows * shape.width for shape in wanted), default=0)
        vocab_size = len(segments.model.decoder.lm_head.weight)
        # Of one step at a time; what graphs have of their own is small.
        self._logits = torch.empty(max_tokens, vocab_size, device=device)
        self._steps: dict[Shape, DecodeStep] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def record(self, shape: Shape, record: Record) -> None:
        """Raises what ``record`` raises, torch.OutOfMemoryError above all."""
        slots, depths = self._inputs[:, : shape.num_rows]
        logits = self._logits[: shape.num_rows * shape.width]
        step = DecodeStep(self._segments, slots, depths, shape.width, self._max_keys, logits)
        step.record(record)
        self._steps[shape] = step

    def find(self, slots: np.ndarray, depths: np.ndarray) -> DecodeStep | None:
        """A step that is to run with ``slots`` and ``depths`` [B] int64 next."""
        width = 1 + int(depths.max(initial=0))
        fitting = (
            shape for shape in self._steps if shape.num_rows >= len(slots) and shape.width >= width
        )
        shape = min(fitting, default=None)
        if shape is None:
            return None
        self._fill(slots, depths)
        return self._steps[shape]

    def _fill(self, slots: np.ndarray, depths: np.ndarray) -> None:
        """Only what is new goes to the device: mostly the same rows decode as before."""
        rows = np.zeros_like(self._rows)
        rows[0] = self._null_slot
        rows[:, : len(slots)] = slots, depths
        if not np.array_equal(rows, self._rows):
            self._inputs.copy_(upload(rows, self._device))
            self._rows = rows


@torch.inference_mode()
def record_graphs(
    segments: Segments, wanted: Sequence[Shape], capacity: Capacity, progress: Progress
) -> StepGraphs:
    """Says what was recorded, and what was not, where the memory is short."""
    device = segments.eos_ids.device
    graphs = StepGraphs(segments, wanted, capacity.max_num_seqs, capacity.max_model_len)
    record = CudaRecorder(device) if device.type == "cuda" else _run_and_return
    started_s, free = time.perf_counter(), read_memory(device).free
    for index, shape in enumerate(wanted):
        progress("capturing CUDA graphs", index / len(wanted))
        try:
            graphs.record(shape, record)
        except torch.OutOfMemoryError as error:
            skipped = f"{shape.num_rows} sequences of {shape.width} tokens"
            log.warning(
                "CUDA graphs: none for %s, which run eagerly: %s", skipped, why_out_of_memory(error)
            )
    if wanted:
        seconds, taken = time.perf_counter() - started_s, free - read_memory(device).free
        log.info("CUDA graphs: %d of steps, %.1f s, %s", len(graphs), seconds, mib(taken))
    return graphs


def _run_and_return(run: Run) -> Run:
    """On a CPU, which has no graphs."""
    run()
    return run


class CudaRecorder:
    """Captures functions as graphs that share their memory: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Run) -> Run:
        """Runs it before: kernels are compiled then, and libraries get their memory. And after: who
        is captured next finds in its tensors what belongs there."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool)
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # what went wrong is the error to tell
                    graph.capture_end()
                raise
            graph.capture_end()
            graph.replay()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay
