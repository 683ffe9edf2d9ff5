"""The forms that a product's weights [outputs, inputs] may have. Parameters are made empty: the
loader fills every one or raises."""

from typing import Literal

import torch
from torch import Tensor, nn

Quantization = Literal["none", "wint8"]
MAX_CODE = 127


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
        self.dtype = dense.dtype
        values = dense.float()
        scales = (values.abs().amax(1) / MAX_CODE).clamp_(min=torch.finfo(torch.float32).tiny)
        codes = (values / scales[:, None]).round_().to(torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    @property
    def values(self) -> Tensor:
        """What it stands for, computed anew in the type that it was made from."""
        return (self.codes * self.scales[:, None]).to(self.dtype)


Weight = Dense | Int8
FORMS: dict[Quantization, type[Int8]] = {"wint8": Int8}  # of what is quantised
