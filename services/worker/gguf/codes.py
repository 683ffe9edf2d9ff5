"""The types of quantized tensors in GGUF files as integer codes with scales.

Each value is scale · code − least, in float32 and in this order, as in the ``gguf`` package. Rows
of blocks come as bytes [outputs, blocks, bytes].
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Coded(NamedTuple):
    """``codes`` [outputs, inputs] int8 of ``bits`` 4 or up to 8; ``scales`` [outputs, groups]
    float32, and ``least`` of the same shape, with which codes begin at 0."""

    codes: Tensor
    scales: Tensor
    least: Tensor | None
    bits: int

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def values(self) -> Tensor:
        """[outputs, inputs] float32"""
        numbers: Tensor = self.codes.float().unflatten(1, (-1, self.group))
        numbers.mul_(self.scales[..., None])
        if self.least is not None:
            numbers.sub_(self.least[..., None])
        return numbers.flatten(1)


def q4_0(blocks: Tensor) -> Coded:
    return Coded(_halves(blocks[..., 2:]).sub_(8).flatten(1), _half(blocks, 0), None, 4)


def q4_1(blocks: Tensor) -> Coded:
    return Coded(_halves(blocks[..., 4:]).flatten(1), _half(blocks, 0), -_half(blocks, 2), 4)


def q5_0(blocks: Tensor) -> Coded:
    codes = _with_fifth(blocks[..., 6:], blocks[..., 2:6]).sub_(16)
    return Coded(codes.flatten(1), _half(blocks, 0), None, 8)


def q5_1(blocks: Tensor) -> Coded:
    codes = _with_fifth(blocks[..., 8:], blocks[..., 4:8])
    return Coded(codes.flatten(1), _half(blocks, 0), -_half(blocks, 2), 8)


def q8_0(blocks: Tensor) -> Coded:
    codes = blocks[..., 2:].contiguous().view(torch.int8)
    return Coded(codes.flatten(1), _half(blocks, 0), None, 8)


def q4_k(blocks: Tensor) -> Coded:
    codes = _halves(blocks[..., 16:].unflatten(-1, (4, 32)))
    return Coded(codes.flatten(1), *_scales_of_k(blocks), 4)


def q5_k(blocks: Tensor) -> Coded:
    codes = _halves(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32))
    fifth = _bits(blocks[..., None, 16:48], 8, 1)  # [outputs, blocks, 8, 32]
    codes = codes.flatten(2, 3) | fifth << 4
    return Coded(codes.flatten(1), *_scales_of_k(blocks), 8)


def q6_k(blocks: Tensor) -> Coded:
    low = _halves(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    high = _bits(blocks[..., 128:192].unflatten(-1, (2, 1, 32)), 4, 2)  # [..., 2, 4, 32]
    codes = (low | high << 4).sub_(32)
    steps = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = _half(blocks, 208)[..., None] * steps
    return Coded(codes.flatten(1), scales.flatten(1), None, 8)


KINDS: dict[str, Callable[[Tensor], Coded]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of each block, [outputs, blocks] float32."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()


def _halves(places: Tensor) -> Tensor:
    """Lower halves of the bytes [..., n], and then the upper ones: [..., 2 n] int8."""
    return torch.cat((places & 15, places >> 4), -1).view(torch.int8)


def _bits(places: Tensor, num: int, width: int) -> Tensor:
    """Bytes [..., 1, n] → their ``num`` parts of ``width`` bits, lowest first: [..., num, n]."""
    shifts = torch.arange(0, num * width, width, dtype=torch.uint8)[:, None]
    return (places >> shifts & (1 << width) - 1).view(torch.int8)


def _with_fifth(places: Tensor, fifth: Tensor) -> Tensor:
    """Codes of five bits: bit i of the four bytes ``fifth`` belongs to code i."""
    bits = _bits(fifth[..., None, :], 8, 1).transpose(-1, -2).flatten(-2)
    return _halves(places) | bits << 4


def _scales_of_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and least values of eight groups in a block, each a float16 times six bits."""
    first, second, mixed = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    steps = torch.cat((first & 63, mixed & 15 | first >> 2 & 48), -1)
    least = torch.cat((second & 63, mixed >> 4 | second >> 2 & 48), -1)
    scales = _half(blocks, 0)[..., None] * steps
    return scales.flatten(1), (_half(blocks, 2)[..., None] * least).flatten(1)
