"""Linear layers. Parameters are made empty: the loader fills every one or raises."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


def empty_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Piece(NamedTuple):
    """The part of a checkpoint's tensor that fills ``destination``: along ``dim``, what begins at
    ``start``. The whole tensor has ``size`` there; None: there is no more of it."""

    destination: Tensor
    dim: int = 0
    start: int = 0
    size: int | None = None


class Dense(nn.Module):
    """A weight of numbers [outputs, inputs]. Other forms, of codes and scales, stand beside it."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.values = empty_parameter(outputs, inputs, dtype=dtype)


class Columns(NamedTuple):
    """Some inputs of a checkpoint's ``layer``, which has ``total``: those from ``start`` on."""

    layer: str
    start: int
    total: int


class Linear(nn.Module):
    """[T, inputs] → [T, outputs]

    ``outputs`` may be the sizes of several layers of a checkpoint that share their input, by their
    names beside this one: they are one product. With ``columns`` it is a part of a layer.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int | dict[str, int],
        has_bias: bool = False,
        *,
        columns: Columns | None = None,
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.outputs = outputs if isinstance(outputs, int) else sum(outputs.values())
        self.weight = Dense(self.outputs, inputs)
        self.bias = empty_parameter(self.outputs) if has_bias else None
        self._parts = None if isinstance(outputs, int) else outputs
        self._columns = columns

    def checkpoint_pieces(self, name: str) -> dict[str, Piece]:
        values = self.weight.values
        if self._columns is not None:
            layer, start, total = self._columns
            return {f"{layer}.weight": Piece(values, 1, start, total)}
        parts = self._parts or {name: self.outputs}
        tensors = {"weight": values} if self.bias is None else {"weight": values, "bias": self.bias}
        return {
            f"{part}.{kind}": Piece(piece)
            for kind, tensor in tensors.items()
            for part, piece in zip(parts, torch.split(tensor, [*parts.values()]), strict=True)
        }
