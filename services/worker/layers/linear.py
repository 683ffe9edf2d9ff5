"""Linear layers, and their parts in a checkpoint."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from services.worker.layers.parallel import Rows, Shard, as_shard
from services.worker.layers.weights import Dense, Weight, empty_parameter

META = torch.device("meta")


class WeightPiece(NamedTuple):
    """The part of a checkpoint's tensor that fills ``destination``: along ``dim``, the range from
    ``start`` on, or the ``rows`` [n] int64. The whole tensor has ``size`` there; None: the range is
    the whole tensor. ``num_ranks`` share its columns. ``offset`` is added to its numbers."""

    destination: Tensor
    dim: int = 0
    start: int = 0
    size: int | None = None
    num_ranks: int = 1
    offset: float = 0.0
    rows: np.ndarray | None = None

    @property
    def whole(self) -> list[int]:
        """The shape of the whole tensor."""
        shape = list(self.destination.shape)
        shape[self.dim] = self.size or shape[self.dim]
        return shape


def row_piece(destination: Tensor, part: Shard | Rows) -> WeightPiece:
    if isinstance(part, Rows):
        return WeightPiece(destination, size=part.total, rows=part.ids)
    return WeightPiece(destination, 0, part.start, part.total)


class Columns(NamedTuple):
    """Some inputs of a checkpoint's ``layer`` with ``total`` inputs: from ``start`` on."""

    layer: str
    start: int
    total: int


class Linear(nn.Module):
    """[T, inputs] → [T, outputs]

    ``outputs`` may be the sizes of several layers of a checkpoint with a common input, by their
    names next to this one: they are one GEMM. With ``columns`` or ``Rows`` it is a part of a layer.
    Ranks share its outputs or its inputs; each has the bias of its outputs. Its weight is dense and
    on no device until it is filled.
    """

    def __init__(
        self,
        inputs: int | Shard,
        outputs: int | Shard | Mapping[str, int | Shard | Rows],
        has_bias: bool = False,
        *,
        columns: Columns | None = None,
    ) -> None:
        super().__init__()
        self._input_shard = as_shard(inputs)
        merged = outputs if isinstance(outputs, Mapping) else {"": outputs}
        self._parts = {
            name: part if isinstance(part, Rows) else as_shard(part)
            for name, part in merged.items()
        }
        self.sizes = [part.num for part in self._parts.values()]
        self._columns = columns
        self.inputs, self.outputs = self._input_shard.num, sum(self.sizes)
        self.weight: Weight = Dense(self.outputs, self.inputs, device="meta")
        self.bias = empty_parameter(self.outputs) if has_bias else None

    @property
    def parts(self) -> dict[str, Shard | Rows]:
        """The rows of each layer of a checkpoint, by its name; empty: this layer's own."""
        return self._parts

    @property
    def input_shard(self) -> Shard:
        return self._input_shard

    @property
    def is_partial(self) -> bool:
        """Products of all ranks must be added up, and then the bias."""
        return self._input_shard.num < self._input_shard.total

    @property
    def is_first(self) -> bool:
        """True on the first rank of a sum over ranks, and for a layer without a sum."""
        return self._input_shard.start == 0

    @property
    def is_empty(self) -> bool:
        """It is another rank's: nothing of it is filled, and no GEMM uses it."""
        return not self.inputs or not self.outputs

    @property
    def is_shard(self) -> bool:
        """Its parts are not whole layers, or their rows have another order."""
        return self.is_partial or any(
            isinstance(each, Rows) or each.num < each.total for each in self._parts.values()
        )

    def allocate(self, device: torch.device) -> None:
        """Gives the weight uninitialized memory of its own."""
        assert isinstance(self.weight, Dense)
        self.weight = Dense(self.outputs, self.inputs, self.weight.values.dtype, device)

    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        if self._columns is not None:
            layer, start, total = self._columns
            return {f"{layer}.weight": WeightPiece(self.weight.values, 1, start, total)}
        pieces = {}
        for part, rows, values in self._split(self.weight.values):
            pieces[f"{part or name}.weight"] = (
                self._columns_piece(values) if self.is_partial else row_piece(values, rows)
            )
        if self.bias is not None:
            for part, rows, values in self._split(self.bias):
                pieces[f"{part or name}.bias"] = row_piece(values, rows)
        return pieces

    def _columns_piece(self, values: Tensor) -> WeightPiece:
        start, num, total = self._input_shard
        return WeightPiece(values, 1, start, total, num_ranks=total // max(1, num))

    def _split(self, tensor: Tensor) -> Iterator[tuple[str, Shard | Rows, Tensor]]:
        return zip(self._parts, self._parts.values(), tensor.split(self.sizes), strict=True)
