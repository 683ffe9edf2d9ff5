"""Decode steps as CUDA graphs: the host replays hundreds of kernels with one call.

Each recorded number of rows has a set of graphs with one token per row, and one with the most
drafts. A step takes the next larger set. Surplus rows are padding (the null slot), and surplus
drafts are masked.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kernels.sizes import ALIGNED, cdiv
from services.worker.engine.device.recorders import CaptureError
from services.worker.engine.device.segments import Segments
from services.worker.engine.device.steps import DecodeStep, Record
from services.worker.machine.streams import upload
from shared.errors import ConfigError


class Shape(NamedTuple):
    num_rows: int
    width: int  # tokens per row

    def __str__(self) -> str:
        return f"{self.num_rows} sequences of {self.width} tokens"


def shapes(sizes: Sequence[int], max_rows: int, max_tokens: int, max_drafts: int) -> list[Shape]:
    """Returns the shapes to record, the largest first: smaller ones share its memory.

    No step has more than ``max_tokens``, so no shape does.
    """
    found = {
        Shape(num_rows, 1 + depth)
        for num_rows in {min(size, max_rows) for size in sizes}
        for depth in {0, max_drafts}
    }
    fitting = [shape for shape in found if shape.num_rows * shape.width <= max_tokens]
    return sorted(fitting, reverse=True)


class StepGraphs:
    """Recorded decode steps of several shapes, for any slots."""

    def __init__(
        self, segments: Segments, wanted: Sequence[Shape], max_rows: int, max_keys: int
    ) -> None:
        """``wanted``: the shapes that may be recorded, with at most ``max_rows`` rows."""
        device = segments.eos_ids.device
        self._segments = segments
        self._max_keys = max_keys
        self._device = device
        self._null_slot = len(segments.state.is_open) - 1
        # Slots and depths of the rows; all shapes read the same memory.
        self._rows = np.zeros((2, cdiv(max_rows, ALIGNED) * ALIGNED), np.int32)
        self._rows[0] = self._null_slot
        self._inputs = upload(self._rows, device)
        max_tokens = max((shape.num_rows * shape.width for shape in wanted), default=0)
        model = segments.model
        # Shared by all shapes, because steps run one at a time.
        self._logits = torch.empty(max_tokens, model.vocab_size, device=device)
        dtype = segments.kv_cache.dtype
        self._out = torch.empty(max_rows, model.hidden_size, dtype=dtype, device=device)
        self._steps: dict[Shape, DecodeStep] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def record(self, shape: Shape, record: Record) -> None:
        """Raises torch.OutOfMemoryError, and ConfigError if a step cannot be recorded."""
        try:
            self._record(shape, record)
        except CaptureError as error:
            raise ConfigError(
                f"enforce-eager: a step of {shape.num_rows} sequences cannot be captured as a CUDA"
                f" graph: {error}; set it to run without graphs"
            ) from error

    def _record(self, shape: Shape, record: Record) -> None:
        slots, depths = self._inputs[:, : shape.num_rows]
        where = self._logits[: shape.num_rows * shape.width], self._out[: shape.num_rows]
        step = DecodeStep(self._segments, slots, depths, shape.width, self._max_keys, *where)
        alike = (each for each in self._steps if each.num_rows == shape.num_rows)
        other = next(alike, None)
        step.record(record, None if other is None else self._steps[other].next_draft)
        self._steps[shape] = step

    def find(self, slots: np.ndarray, depths: np.ndarray) -> DecodeStep | None:
        """Returns a step ready to run with ``slots`` and ``depths`` [B] int64, if a shape fits."""
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
        """Uploads only changes: consecutive steps mostly decode the same rows."""
        rows = np.zeros_like(self._rows)
        rows[0] = self._null_slot
        rows[:, : len(slots)] = slots, depths
        if not np.array_equal(rows, self._rows):
            self._inputs.copy_(upload(rows, self._device))
            self._rows = rows
