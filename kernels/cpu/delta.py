"""The gated delta rule, Mamba-2's, Kimi's and lightning attention in native code: their weights,
and the states of a step.

The structures are those of ``delta.h``, field by field.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.pointers import Float, Int, Pointer, address, array_address
from kernels.delta import LayerStates, LightningTerms, ScanTerms, StateRows

MAX_KEY_DIM, MAX_VALUE_DIM, MAX_WIDTH = 256, 256, 8


class DeltaStruct(ctypes.Structure):
    _fields_ = [
        *((name, Int) for name in ("num_heads", "num_key_heads", "key_dim", "value_dim", "width")),
        *((name, Int) for name in ("is_by_channel", "num_norms", "num_rotated")),
        *((name, Float) for name in ("eps", "least", "most")),
        *((name, Pointer) for name in ("conv", "rates", "dt_bias", "norm", "skip", "bias")),
        *((name, Pointer) for name in ("norms", "cos", "sin")),
    ]


class _LayerStruct(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in ("matrices", "columns", "kept")),
        ("most_drafts", Int),
    ]


class StateRowsStruct(ctypes.Structure):
    _fields_ = [
        *((name, Int) for name in ("num_rows", "interval")),
        *((name, Pointer) for name in ("starts", "num_drafts", "states")),
        *((name, Pointer) for name in ("positions", "num_kept", "num_seen", "copies")),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedDelta:
    """``conv`` [width, channels], ``rates`` (exp(A_log)) and ``dt_bias`` [num_heads], by channel
    [num_heads · key_dim], ``norm`` [value_dim], or as ``scan`` has it, float32."""

    num_key_heads: int
    key_dim: int
    conv: Tensor
    rates: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    scan: ScanTerms | LightningTerms | None = None

    @property
    def value_dim(self) -> int:
        return len(self.norm) // (1 if self.scan is None else len(self.rates))

    def struct(self) -> DeltaStruct:
        scan = self.scan if isinstance(self.scan, ScanTerms) else None
        skip, bias, (least, most) = scan or (None, None, (0.0, 0.0))
        terms = self.scan if isinstance(self.scan, LightningTerms) else None
        cos, sin = terms.rotation if terms else (None, None)
        return DeltaStruct(
            num_heads=len(self.rates),
            num_key_heads=self.num_key_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            width=len(self.conv),
            is_by_channel=len(self.dt_bias) > len(self.rates),
            num_norms=terms.num_groups if terms else self.num_key_heads,
            num_rotated=0 if cos is None else cos.shape[1],
            eps=self.eps,
            least=least,
            most=most,
            conv=address(self.conv),
            rates=address(self.rates),
            dt_bias=address(self.dt_bias),
            norm=address(self.norm),
            skip=address(skip),
            bias=address(bias),
            norms=address(terms and terms.norms),
            cos=address(cos),
            sin=address(sin),
        )

    def check(self, states: LayerStates) -> None:
        """Raises ValueError for states of other sizes or in another form."""
        (width, channels), num_heads = self.conv.shape, len(self.rates)
        matrices, columns, kept = (tuple(each.shape[1:]) for each in states)
        num_gates = len(self.dt_bias) + (num_heads if self.scan is None else 0)
        expected = (num_heads, self.key_dim, self.value_dim), (width, channels)
        if (matrices, columns) != expected or kept[1:] != (channels + num_gates,):
            raise ValueError(f"states {matrices}, {columns} and drafts {kept} are not {expected}")
        if any(each.dtype != torch.float32 or not each.is_contiguous() for each in states):
            raise ValueError("states are not float32, or not contiguous")


class StateLayers:
    """Addresses of the states of all layers."""

    def __init__(self, layers: Sequence[LayerStates]) -> None:
        self.layers = layers
        self.structs = (_LayerStruct * len(layers))(*map(_layer, layers))


def _layer(states: LayerStates) -> _LayerStruct:
    return _LayerStruct(*map(address, states), states.kept.shape[1])


def state_rows(rows: StateRows) -> StateRowsStruct:
    *arrays, interval = rows
    return StateRowsStruct(len(rows.states), interval, *map(array_address, arrays))
