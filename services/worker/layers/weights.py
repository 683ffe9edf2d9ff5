"""The forms that a product's weights [outputs, inputs] may have. Parameters are made empty: the
loader fills every one or raises."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Quantization = Literal["none", "wint8", "wint4"]
MAX_CODE = 127
GROUP = 32
TRIED_SHARES = (0.92, 0.84)  # of a scale
ROWS_AT_ONCE = 1024  # are quantised, in float32


def empty_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Dense(nn.Module):
    """The numbers themselves."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.values = empty_parameter(outputs, inputs, dtype=dtype)


class Int8(nn.Module):
    """Whole numbers −127 … 127, and a scale [outputs] float32 that those of each output are
    multiplied with, so that the largest of them is the largest number of ``dense``."""

    def __init__(self, dense: Tensor) -> None:
        super().__init__()
        self.dtype, self.shape = dense.dtype, dense.shape
        values = dense.float()
        scales = (values.abs().amax(1) / MAX_CODE).clamp_(min=torch.finfo(torch.float32).tiny)
        codes = (values / scales[:, None]).round_().to(torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    @property
    def values(self) -> Tensor:
        """What it stands for, computed anew in the type that it was made from."""
        return (self.codes * self.scales[:, None]).to(self.dtype)


class Int4(nn.Module):
    """Whole numbers −8 … 7, and a scale [outputs, groups] bfloat16 that GROUP neighbours of an
    output are multiplied with, positive or negative, so that the one farthest from 0 is −8; or a
    share of that, where so fewer squares are lost by rounding than are by cutting the farthest off.

    ``codes`` [outputs, groups · GROUP / 2] uint8 are 8 more, two in a byte, the first one in its
    lower half. llama.cpp's Q4_0 stands for the same numbers, with scales in float16.
    """

    def __init__(self, dense: Tensor) -> None:
        super().__init__()
        self.dtype, self.shape = dense.dtype, dense.shape
        parts = [_quantised(rows) for rows in dense.split(ROWS_AT_ONCE)]
        codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    @property
    def values(self) -> Tensor:
        """What it stands for, computed anew in the type that it was made from."""
        values = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1).float().sub_(8)
        values.unflatten(1, (-1, GROUP)).mul_(self.scales[..., None])
        return values[:, : self.shape[1]].to(self.dtype)


def _quantised(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes, two in a byte, and scales for some rows."""
    values = functional.pad(dense.float(), (0, -dense.shape[1] % GROUP))
    groups = values.unflatten(1, (-1, GROUP))
    farthest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = (farthest / -8).bfloat16()
    codes, errors = _codes_of(groups, scales)
    for share in TRIED_SHARES:
        tried = (farthest * (share / -8)).bfloat16()
        tried_codes, tried_errors = _codes_of(groups, tried)
        is_better = tried_errors < errors
        scales, codes = tried.where(is_better, scales), tried_codes.where(is_better, codes)
        errors = errors.minimum(tried_errors)
    stored = codes.add_(8).to(torch.uint8).flatten(1)
    return stored[:, ::2] | stored[:, 1::2] << 4, scales.squeeze(2)


def _codes_of(groups: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes of groups [outputs, groups, GROUP] with scales [outputs, groups, 1], and
    the sum of each group's squared errors."""
    units = torch.where(scales == 0, 1, scales.float())
    codes = (groups / units).round_().clamp_(-8, 7)
    return codes, (codes * units).sub_(groups).square_().sum(2, keepdim=True)


Weight = Dense | Int8 | Int4
FORMS: dict[Quantization, type[Int8] | type[Int4]] = {"wint8": Int8, "wint4": Int4}
