"""Layers of GGUF files in our forms of weights. A layer's only tensor is named by its type."""

from collections.abc import Mapping

import torch
from torch import Tensor

from services.worker.gguf.codes import KINDS, Coded
from services.worker.layers.weights import Weight
from services.worker.weights.checkpoint import StoredTensor
from services.worker.weights.schemes.scheme import Scheme, Stored, dense, whole_numbers
from shared.gguf.file import QUANTIZED

# Of an element in memory: its code, and its part of float32 scales and zeros.
BITS = {
    "Q4_0": 5,
    "Q4_1": 6,
    "Q4_K": 6,
    "Q5_0": 9,
    "Q8_0": 9,
    "Q5_1": 10,
    "Q5_K": 10,
    "Q6_K": 10,
}


class Gguf(Scheme):
    """Values without a least one are codes of the same values. With one they are codes whose zeros
    are rounded to float32, except in a model in float32, which is exact: there they are dense."""

    suffixes = tuple(QUANTIZED)

    def growth(self, tensor: StoredTensor) -> float:
        kind = tensor.name.rpartition(".")[2]
        if kind not in QUANTIZED:
            return 1.0
        return QUANTIZED[kind].size * BITS[kind] / 8 / QUANTIZED[kind].num_bytes

    def holds(self, stored: Stored) -> bool:
        return bool(stored)

    def shape(self, stored: Stored) -> list[int]:
        ((kind, tensor),) = stored.items()
        *outer, num_bytes = tensor.shape
        return [*outer, num_bytes // QUANTIZED[kind].num_bytes * QUANTIZED[kind].size]

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        ((kind, rows),) = tensors.items()
        coded = KINDS[kind](rows.unflatten(1, (-1, QUANTIZED[kind].num_bytes)))
        if coded.least is not None and dtype == torch.float32:
            return dense(coded.values(), dtype)
        codes, scales, zeros = _with_zeros(coded)
        return whole_numbers(codes, coded.bits, scales, zeros, dtype, group=coded.group)


def _with_zeros(coded: Coded) -> tuple[Tensor, Tensor, Tensor | None]:
    """scale · (code − zero) for scale · code − least. A group without a scale has the code 0 and
    the zero 1."""
    if coded.least is None:
        return coded.codes, coded.scales, None
    is_flat = coded.scales == 0
    scales = torch.where(is_flat, coded.least, coded.scales)
    zeros = torch.where(is_flat, 1.0, coded.least / coded.scales)
    codes = coded.codes.unflatten(1, (-1, coded.group)) * ~is_flat[..., None]
    if coded.bits == 4:  # in [0, 15]
        codes, zeros = codes - 8, zeros - 8
    return codes.flatten(1), scales, zeros


SCHEME = Gguf
