"""Steps that only decode, as CUDA graphs: the host replays hundreds of kernels with one call.

There is one set of graphs for each number of rows and either number of tokens of a row: one, or as
many as the most drafts want. A step takes the next larger set; surplus rows are padding (the
null slot), and drafts too many are masked.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from services.worker.engine.device.recorders import CaptureError
from services.worker.engine.device.segments import Segments
from services.worker.engine.device.steps import DecodeStep, Record
from services.worker.machine.streams import ALIGNED, upload
from shared.errors import ConfigError


class Shape(NamedTuple):
    num_rows: int
    width: int  # tokens of a row

    def __str__(self) -> str:
        return f"{self.num_rows} sequences of {self.width} tokens"


def shapes(sizes: Sequence[int], max_rows: int, max_tokens: int, max_drafts: int) -> list[Shape]:
    """Those to record, the largest first: they need most memory, which the others then share.

    None has more than ``max_tokens``, which no step has.
    """
    found = {
        Shape(num_rows, 1 + depth)
        for num_rows in {min(size, max_rows) for size in sizes}
        for depth in {0, max_drafts}
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
        model = segments.model
        # Of one step at a time; what graphs have of their own is small.
        self._logits = torch.empty(max_tokens, model.vocab_size, device=device)
        dtype = segments.kv_cache.dtype
        self._out = torch.empty(max_rows, model.hidden_size, dtype=dtype, device=device)
        self._steps: dict[Shape, DecodeStep] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def record(self, shape: Shape, record: Record) -> None:
        """Raises torch.OutOfMemoryError, and ConfigError where a step cannot be recorded."""
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
