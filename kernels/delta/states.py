"""The states of a step's sequences, and the weights of a layer."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor


class StateRows(NamedTuple):
    """The states of R rows, and their tokens among the T of a step."""

    starts: np.ndarray  # [R + 1] int64: the first token of each row, and T
    num_drafts: np.ndarray  # [R] int64: the last tokens of each row
    states: np.ndarray  # [R] int64: the number of a row's state, and of its kept drafts
    positions: np.ndarray  # [R] int64: tokens that the state has seen
    num_kept: np.ndarray  # [R] int64: accepted drafts of the last step; the state lacks them
    num_seen: np.ndarray  # [R] int64, 1 if the state has seen the first token, and lacks nothing
    copies: np.ndarray  # [R] int64: the state for a copy, behind a multiple of interval; -1: none
    interval: int


class LayerStates(NamedTuple):
    """The part of one layer in N states, and in the kept drafts of the first M of them."""

    matrices: Tensor  # [N, num_value_heads, key_dim, value_dim] float32
    columns: Tensor  # [N, width, channels] float32: inputs (q, k, v), the last token's last
    kept: Tensor  # [M, most drafts, channels + gates] float32: (q, k, v) and (b, a), or dt


class States(NamedTuple):
    """The states of a step's sequences."""

    layers: Sequence[LayerStates]  # one for each layer with a state
    rows: StateRows

    def of_layer(self, layer: int) -> tuple[LayerStates, StateRows]:
        return self.layers[layer], self.rows


class ScanTerms(NamedTuple):
    """Of Mamba-2's rule: ``skip`` (D) [num_value_heads], the ``bias`` of the convolution
    [channels], and the ``limits`` of a token's step."""

    skip: Tensor
    bias: Tensor | None
    limits: tuple[float, float]

    def in_floats(self) -> "ScanTerms":
        """The same in float32."""
        bias = None if self.bias is None else self.bias.float()
        return ScanTerms(self.skip.float(), bias, self.limits)


class LightningTerms(NamedTuple):
    """Of lightning attention: ``norms`` [2, key_dim] of queries and keys, and the ``rotation``
    [2, positions, R] of their first R elements, cosines and signed sines as in ``kernels.rope``.
    Outputs of ``num_groups`` groups of heads are normed."""

    norms: Tensor
    rotation: Tensor
    num_groups: int

    def in_floats(self) -> "LightningTerms":
        """The same in float32."""
        return self._replace(norms=self.norms.float(), rotation=self.rotation.float())


class DeltaWeights(NamedTuple):
    """``conv`` [channels, width], ``decay`` (A_log) and ``dt_bias`` [num_value_heads], ``norm``
    [value_dim], or [num_value_heads · value_dim] for a scan. The channels are q, k and v, in this
    order. With decays by channel ``dt_bias`` is [num_value_heads · key_dim]. Lightning attention
    has none, and ones [channels, 1] as ``conv``."""

    num_key_heads: int
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    scan: ScanTerms | LightningTerms | None = None

    @property
    def is_by_channel(self) -> bool:
        return len(self.dt_bias) > len(self.decay)

    @property
    def num_norms(self) -> int:
        """The number of parts of an output that are normed."""
        if isinstance(self.scan, LightningTerms):
            return self.scan.num_groups
        return len(self.decay) if self.scan is None else self.num_key_heads
