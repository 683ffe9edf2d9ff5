"""Rotations at positions with several axes."""

from collections.abc import Sequence

import numpy as np
import torch

from services.worker.config.model_config import ModelConfig
from services.worker.layers.rope import RotaryEmbedding
from services.worker.machine.streams import upload
from services.worker.media.qwen_vl import SECTION, AxesConfig, mixed_axes, section_problem
from shared.errors import ConfigError


def axes_of(config: ModelConfig, num_axes: int) -> list[int]:
    """The axis of each frequency, for positions of ``num_axes``. Raises ConfigError."""
    num = config.rotary_dim // 2
    if num_axes == 1:
        return [0] * num
    if isinstance(config, AxesConfig):
        return config.rope_axes
    section = config.rope_values.get(SECTION)
    if problem := section_problem(section, num):
        raise ConfigError(f"model: {problem}")
    assert section is not None
    return mixed_axes(section)


class Rotations:
    """Adds ``num_rows`` rows to the table of ``rotary``, before a backend takes it. ``axes`` has
    the axis of each frequency; a model with one axis needs no row."""

    def __init__(self, rotary: RotaryEmbedding, axes: Sequence[int], num_rows: int) -> None:
        self.num_axes = 1 + max(axes)
        table = rotary.table
        self._first = table.shape[1]
        if self.num_axes > 1:
            rows = table.new_zeros(len(table), num_rows, table.shape[2])
            table = torch.cat((table, rows), 1)
        self._table = rotary.table = table
        is_interleaved = rotary.is_interleaved  # of each column:
        self._axes = np.repeat(axes, 2) if is_interleaved else np.tile(axes, 2)

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """positions [axes, T] → rows [T] int64 of the table, until the next call. Where the axes
        are equal it is the row of the position."""
        rows: np.ndarray = positions[0].copy()
        places = np.flatnonzero((positions != rows).any(0))
        if len(places):
            of_columns = upload(positions[self._axes[:, None], places].T, self._table.device)
            end = self._first + len(places)
            found = self._table.gather(1, of_columns.expand(len(self._table), -1, -1))
            self._table[:, self._first : end] = found
            rows[places] = np.arange(self._first, end)
        return rows
