"""Linear layers. Parameters are made empty: the loader fills every one or raises."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


def empty_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """[..., in_features] → [..., out_features]"""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Several layers of a checkpoint that share their input, computed as one product.

    ``out_features`` gives their sizes by their names in the checkpoint, beside this layer.
    """

    def __init__(self, in_features: int, out_features: dict[str, int], bias: bool = False) -> None:
        super().__init__(in_features, sum(out_features.values()), bias)
        self.out_features = out_features

    def checkpoint_pieces(self) -> dict[str, Tensor]:
        sizes = list(self.out_features.values())
        return {
            f"{name}.{kind}": piece
            for kind, parameter in self.named_parameters()
            for name, piece in zip(self.out_features, torch.split(parameter, sizes), strict=True)
        }
