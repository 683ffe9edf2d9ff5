"""The gated delta rule of a layer, another of ``kernels.delta``, with the place of its states; and
the columns of a short convolution in the KV cache."""

from typing import NamedTuple

from torch import Tensor, nn

from kernels.delta import DeltaWeights, LightningTerms, ScanTerms


class DeltaRule(NamedTuple):
    """``layer`` is the place of its states in the context; parameters as in ``kernels.delta``, with
    heads and channels of this rank."""

    layer: int
    num_key_heads: int
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    scan: ScanTerms | LightningTerms | None = None

    @property
    def weights(self) -> DeltaWeights:
        return DeltaWeights(*self[1:])

    @property
    def num_heads(self) -> int:
        return len(self.decay)

    @property
    def channels(self) -> int:
        return len(self.conv)

    @property
    def num_gates(self) -> int:
        return len(self.dt_bias) + (self.num_heads if self.scan is None else 0)

    @property
    def value_dim(self) -> int:
        return len(self.norm) // (1 if self.scan is None else self.num_heads)

    @property
    def key_dim(self) -> int:
        of_keys = self.channels - self.num_heads * self.value_dim
        return of_keys // (2 * self.num_key_heads)


class Columns(NamedTuple):
    """A token has a column in ``num_parts`` caches of the context, from ``layer`` on, with ``part``
    numbers each, in the blocks of a ``group``. ``weight`` [size, width], ``bias`` [size]."""

    layer: int
    num_parts: int
    part: int
    weight: nn.Parameter
    bias: nn.Parameter | None
    group: int = 0
