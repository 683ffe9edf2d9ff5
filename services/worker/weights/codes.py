"""Storage formats for codes of a few bits, and the values of 4-bit codes."""

import torch
from torch import Tensor
from torch.nn import functional

# [16] float32 each.
INT4 = torch.arange(-8.0, 8.0)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # two bits of exponent, one of mantissa
E2M1 = torch.tensor(_E2M1 + tuple(-each for each in _E2M1))
# Quantiles of the normal distribution (arXiv 2305.14314), as bitsandbytes rounds them.
NF4 = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)


def pack_pairs(codes: Tensor) -> Tensor:
    """codes [outputs, inputs] uint8 below 16 → two in a byte, the first one in its lower half:
    [outputs, ⌈inputs / 2⌉]."""
    codes = functional.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, ::2] | codes[:, 1::2] << 4
