"""MXFP4 (OCP Microscaling Formats 1.0), as the experts of gpt-oss are stored."""

from collections.abc import Mapping

import torch
from torch import Tensor

from services.worker.layers.weights import Quantized, Weight
from services.worker.weights.codes import E2M1
from services.worker.weights.schemes.scheme import Scheme, Stored

GROUP, NVFP4_GROUP = 32, 16
BIAS = 127


class Mxfp4(Scheme):
    """``blocks`` [outputs, groups, 16] uint8 have two codes in a byte, the first one in its lower
    half, and ``scales`` [outputs, groups] uint8 the exponents of groups of 32 inputs."""

    suffixes = ("blocks", "scales")

    def holds(self, stored: Stored) -> bool:
        return "blocks" in stored

    def shape(self, stored: Stored) -> list[int]:
        outputs, num_groups, num_bytes = stored["blocks"].shape
        return [outputs, 2 * num_groups * num_bytes]

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        return mxfp4(tensors["blocks"].flatten(1), tensors["scales"], dtype)


def mxfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Quantized:
    """codes [outputs, inputs / 2], two in a byte; scales [outputs, groups], powers of 2 by their
    exponents."""
    return _fp4(codes, powers_of_2(scales), GROUP, dtype)


def nvfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Quantized:
    """The same with scales of groups of 16 inputs, which are numbers."""
    return _fp4(codes, scales, NVFP4_GROUP, dtype)


def powers_of_2(scales: Tensor) -> Tensor:
    """Scales in a byte that are exponents become numbers, others remain."""
    return torch.exp2(scales.float() - BIAS) if scales.dtype == torch.uint8 else scales


def _fp4(codes: Tensor, scales: Tensor, group: int, dtype: torch.dtype) -> Quantized:
    inputs = 2 * codes.shape[1]
    return Quantized(codes, scales, dtype=dtype, inputs=inputs, group=group, table=E2M1.clone())


SCHEME = Mxfp4
