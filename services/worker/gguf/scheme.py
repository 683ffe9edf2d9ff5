"""Layers of GGUF files in our forms of weights. A layer's only tensor is named by its type."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.gguf.codes import KINDS, Coded
from services.worker.layers.weights import Weight
from services.worker.weights.checkpoint import StoredTensor
from services.worker.weights.schemes.scheme import Scheme, Stored, dense, whole_numbers
from shared.formats.gguf.file import QUANTIZED


class Form(NamedTuple):
    """Codes in memory: each ``group`` of them has a float32 scale, and may have a zero."""

    bits: int
    group: int
    has_zeros: bool = False

    def num_bytes(self, num: int) -> int:
        return num * self.bits // 8 + num // self.group * 4 * (1 + self.has_zeros)


FORMS = {
    "Q4_0": Form(4, 32),
    "Q4_1": Form(4, 32, has_zeros=True),
    "Q4_K": Form(4, 32, has_zeros=True),
    "Q5_0": Form(8, 32),
    "Q8_0": Form(8, 32),
    "Q5_1": Form(8, 32, has_zeros=True),
    "Q5_K": Form(8, 32, has_zeros=True),
    "Q6_K": Form(8, 16),
}
# Layers that are one in memory, by the end of their names.
JOINED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up"),
}


class Gguf(Scheme):
    """Values without a least one are codes of the same values. With one they are codes whose zeros
    are rounded to float32, except in a model in float32, which is exact: there they are dense."""

    suffixes = tuple(QUANTIZED)

    def num_bytes(self, tensors: Iterable[StoredTensor], dtype: torch.dtype) -> int:
        layers: dict[str, list[StoredTensor]] = defaultdict(list)
        for each in tensors:
            layers[_layer_of(each.name)].append(each)
        return sum(_layer_bytes(parts, dtype) for parts in layers.values())

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


def _layer_of(name: str) -> str:
    """The layer in memory that has the weights of tensor ``name``."""
    layer, _, kind = name.rpartition(".")
    outer, _, part = layer.rpartition(".")
    return f"{outer}.{JOINED[part]}" if part in JOINED and kind != "bias" else name


def _layer_bytes(parts: list[StoredTensor], dtype: torch.dtype) -> int:
    """A layer is of codes if all parts have them, in groups of the same bits and size."""
    kinds = [each.name.rpartition(".")[2] for each in parts]
    num = sum(_num_elements(each, kind) for each, kind in zip(parts, kinds, strict=True))
    forms = [FORMS[kind] for kind in kinds if kind in FORMS]
    has_zeros = any(each.has_zeros for each in forms)
    is_alike = len(forms) == len(parts) and len({(each.bits, each.group) for each in forms}) == 1
    if not is_alike or (has_zeros and dtype == torch.float32):
        return num * dtype.itemsize
    return forms[0]._replace(has_zeros=has_zeros).num_bytes(num)


def _num_elements(tensor: StoredTensor, kind: str) -> int:
    num = math.prod(tensor.shape)
    return num // QUANTIZED[kind].num_bytes * QUANTIZED[kind].size if kind in QUANTIZED else num


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
