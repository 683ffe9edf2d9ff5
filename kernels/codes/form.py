"""A quantized weight and its dequantization."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

MIN_GROUP, MIN_PACKED_GROUP = 16, 32  # inputs


class Codes(NamedTuple):
    """A quantized weight [N, inputs]: element = (code − zero of its group) · scale of its group.

    ``codes`` are int8 or float8_e4m3fn values [N, inputs], or 4-bit indices into ``table`` [16]
    float32, packed in pairs with the first in the lower half: [N, ⌈inputs / 2⌉] uint8. ``first`` is
    given if the table holds consecutive values ``first``, ``first`` + 1, … Each ``group`` of
    neighbouring inputs of an output shares one scale and one zero, ``scales`` and ``zeros`` [N,
    groups] in bfloat16 or float32. Code i belongs to input ``order[i]``, or to input i without
    ``order``. For the experts of a layer all tensors but the table have a leading dimension [E, …].
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
        """The rows ``ids`` [T], in their order."""
        zeros = None if self.zeros is None else self.zeros[ids]
        return self._replace(codes=self.codes[ids], scales=self.scales[ids], zeros=zeros)

    def expert(self, index: int) -> "Codes":
        """The weight of one expert."""
        zeros, order = (None if each is None else each[index] for each in (self.zeros, self.order))
        codes, scales = self.codes[index], self.scales[index]
        return self._replace(codes=codes, scales=scales, zeros=zeros, order=order)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Dequantized weight [N, inputs], computed in float32 and rounded once."""
        padded = functional.pad(self._numbers(), (0, -self.inputs % self.group))
        groups = padded.view(*self.scales.shape, self.group)
        if self.zeros is not None:
            groups.sub_(self.zeros[..., None])
        values = groups.mul_(self.scales[..., None]).flatten(1)[:, : self.inputs]
        if self.order is not None:
            values = torch.empty_like(values).index_copy_(1, self.order, values)
        return values.to(dtype)

    def _numbers(self) -> Tensor:
        """Codes before zeros and scales, [N, inputs] float32."""
        if self.table is None:
            return self.codes.float()
        places = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1)
        numbers: Tensor = self.table[places[:, : self.inputs].int()]
        return numbers


def first_of(table: Tensor | None) -> float | None:
    """``Codes.first`` of a ``table``. Reads the table on the host, so call it only while loading
    weights."""
    if table is None:
        return None
    first = float(table[0])
    counted = torch.arange(first, first + len(table), dtype=table.dtype, device=table.device)
    return first if torch.equal(table, counted) else None


def has_kernels(codes: Codes) -> bool:
    """True if Triton's kernels support the weight; torch serves the others. Unsupported are
    unaligned rows or groups, and 4-bit groups of 16, which Triton 3.6 multiplies wrongly on
    sm_90."""
    least = MIN_GROUP if codes.table is None else MIN_PACKED_GROUP
    is_whole = codes.num_groups == 1 or codes.group % least == 0
    return is_whole and codes.inputs % MIN_GROUP == 0
