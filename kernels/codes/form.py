"""A weight in codes, and what it stands for."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

MIN_GROUP, MIN_PACKED_GROUP = 16, 32  # inputs


class Codes(NamedTuple):
    """A weight [N, inputs]: a code, less its group's zero, times its group's scale.

    ``codes`` [N, inputs], int8 or float8_e4m3fn, stand for themselves. Those of four bits are two
    in a byte, the first one in its lower half: [N, ⌈inputs / 2⌉] uint8, places in ``table`` [16]
    float32, whose numbers are ``first``, ``first`` + 1, … if that is given. Of an output each
    ``group`` of neighbours shares one of ``scales`` and ``zeros`` [N, groups], bfloat16 or float32.
    The i-th code is that of input ``order[i]``, or i. Those of a layer's experts are one of these,
    with one more dimension [E, …] before the others of all but the table.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    table: Tensor | None
    inputs: int
    group: int
    order: Tensor | None = None
    first: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.codes.shape[:-1], self.inputs

    @property
    def num_groups(self) -> int:
        return self.scales.shape[-1]

    def rows(self, ids: Tensor) -> "Codes":
        """The outputs ``ids`` [T], in their order."""
        zeros = None if self.zeros is None else self.zeros[ids]
        return self._replace(codes=self.codes[ids], scales=self.scales[ids], zeros=zeros)

    def expert(self, index: int) -> "Codes":
        """What one of a layer's experts has."""
        zeros, order = (None if each is None else each[index] for each in (self.zeros, self.order))
        codes, scales = self.codes[index], self.scales[index]
        return self._replace(codes=codes, scales=scales, zeros=zeros, order=order)

    def values(self, dtype: torch.dtype) -> Tensor:
        """[N, inputs], computed in float32 and rounded once."""
        padded = functional.pad(self._numbers(), (0, -self.inputs % self.group))
        groups = padded.view(*self.scales.shape, self.group)
        if self.zeros is not None:
            groups.sub_(self.zeros[..., None])
        values = groups.mul_(self.scales[..., None]).flatten(1)[:, : self.inputs]
        if self.order is not None:
            values = torch.empty_like(values).index_copy_(1, self.order, values)
        return values.to(dtype)

    def _numbers(self) -> Tensor:
        """[N, inputs] float32"""
        if self.table is None:
            return self.codes.float()
        places = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1)
        numbers: Tensor = self.table[places[:, : self.inputs].int()]
        return numbers


def first_of(table: Tensor | None) -> float | None:
    """``Codes.first`` of a ``table``. Reads it: only where weights are loaded."""
    if table is None:
        return None
    first = float(table[0])
    counted = torch.arange(first, first + len(table), dtype=table.dtype, device=table.device)
    return first if torch.equal(table, counted) else None


def has_kernels(codes: Codes) -> bool:
    """Others are torch's: their rows and groups do not begin at places that are aligned, or are
    spans of 16 codes of four bits, which Triton 3.6 multiplies wrongly on a GPU of sm_90."""
    least = MIN_GROUP if codes.table is None else MIN_PACKED_GROUP
    is_whole = codes.num_groups == 1 or codes.group % least == 0
    return is_whole and codes.inputs % MIN_GROUP == 0
