"""MXFP4 (OCP Microscaling Formats 1.0), as the experts of gpt-oss are stored."""

from collections.abc import Mapping

import torch
from torch import Tensor

from services.worker.layers.weights import Quantized, Weight
from services.worker.weights.codes import E2M1
from services.worker.weights.schemes.scheme import Scheme, Stored

GROUP = 32
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
    powers = torch.exp2(scales.float() - BIAS)
    inputs = 2 * codes.shape[1]
    return Quantized(codes, powers, dtype=dtype, inputs=inputs, group=GROUP, table=E2M1.clone())


SCHEME = Mxfp4
