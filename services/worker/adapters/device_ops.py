"""Adapters on a device: deltas by the slots of a step's rows, which CUDA graphs read too."""

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kernels.adapt import Change
from kernels.adapt.bank import AdapterRows, Bank, fill, make_blocks, padded_rank
from kernels.adapt.device import add_deltas, inner_products
from kernels.paged_attention import DeviceAttention
from kernels.rms_norm import rms_norm
from kernels.sizes import cdiv
from services.worker.adapters.sites import Site
from services.worker.adapters.table import NONE
from services.worker.backends.torch_lm import TorchOps
from services.worker.layers.context import current_context
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm
from services.worker.machine.streams import upload

ALIGN = 16  # numbers of a rank, for vector loads


class _Place(NamedTuple):
    """A site's numbers among those of a rank: a [P, K] at ``start``, then b [N]. Its parts begin at
    the outputs ``firsts``."""

    start: int
    inputs: int
    outputs: int
    firsts: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.firsts) * self.inputs + self.outputs

    def views(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """numbers [..., total]"""
        both = len(self.firsts) * self.inputs, self.outputs
        a, b = numbers[..., self.start : self.end].split(both, dim=-1)
        return a.unflatten(-1, (len(self.firsts), self.inputs)), b


class BankForm:
    """Adapters as numbers [rank, total], and those in use on the device in one tensor."""

    def __init__(
        self,
        sites: Sequence[Site],
        max_slots: int,
        *,
        max_adapters: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._linears = [site.module for site in sites if isinstance(site.module, Linear)]
        self._num_slots = max_slots + 1  # with the null slot
        self._dtype, self._device = dtype, device
        self._places = _places_of(self._linears)
        total = max((place.end for place in self._places), default=0)
        self._shape = max_adapters, padded_rank(max_rank), cdiv(total, ALIGN) * ALIGN
        self._known = np.full(max_slots, NONE)  # on the device

    def pack(self, changes: Sequence[Sequence[Change]]) -> Tensor:
        rank = max((len(each.a) for own in changes for each in own), default=0)
        is_on_gpu = self._device.type == "cuda"
        packed = torch.zeros(rank, self._shape[2], dtype=self._dtype, pin_memory=is_on_gpu)
        for place, own in zip(self._places, changes, strict=True):
            fill(*place.views(packed), own, place.firsts)
        return packed

    def bind(self, index: int, adapter: Tensor | None) -> None:
        if adapter is not None:
            self._bound[index, : len(adapter)].copy_(adapter, non_blocking=True)
            self._bound[index, len(adapter) :].zero_()

    def assign(self, of_slots: np.ndarray) -> None:
        if not np.array_equal(of_slots, self._known):
            self._known = of_slots.copy()
            self.of_slots[: len(of_slots)] = upload(of_slots.astype(np.int32), self._device)

    @cached_property
    def of_slots(self) -> Tensor:
        return torch.full((self._num_slots,), NONE, dtype=torch.int32, device=self._device)

    @cached_property
    def banks(self) -> dict[nn.Module, Bank]:
        return {
            linear: Bank(*place.views(self._bound), self._blocks_of(linear))
            for linear, place in zip(self._linears, self._places, strict=True)
        }

    @cached_property
    def _bound(self) -> Tensor:
        """Made by the first pass, so that the memory of steps is measured with it."""
        return torch.zeros(self._shape, dtype=self._dtype, device=self._device)

    def _blocks_of(self, linear: Linear) -> Tensor:
        return upload(np.array(make_blocks(linear.sizes), np.int32), self._device)


def _places_of(linears: Sequence[Linear]) -> list[_Place]:
    places, start = list[_Place](), 0
    for linear in linears:
        firsts = [0, *accumulate(linear.sizes[:-1])]
        places.append(_Place(start, linear.inputs, linear.outputs, firsts))
        start = places[-1].end
    return places


class DeviceAdaptingOps(TorchOps):
    """Rows without adapters are computed as without this class, bit for bit."""

    def __init__(self, form: BankForm, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        attention = current_context().groups[0].attention
        assert isinstance(attention, DeviceAttention)
        self._banks = form.banks
        self._rows = AdapterRows(form.of_slots, attention.decode, attention.chunks)

    def linear(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        bank = None if linear.is_partial else self._banks.get(linear)
        if bank is None:
            return super().linear(x, linear, norm=norm, residual=residual, scale=scale)
        x = x if norm is None else rms_norm(x, norm.weight, norm.eps)
        inner = inner_products(x, bank, self._rows)  # before x may become the residual
        y = super().linear(x, linear, residual=residual, scale=scale)
        add_deltas(y, inner, bank, self._rows, scale)
        return y

    def gated(
        self, x: Tensor, gate_up: Linear, *, norm: RMSNorm | None = None, **options: Any
    ) -> Tensor:
        bank = self._banks.get(gate_up)
        if bank is None:
            return super().gated(x, gate_up, norm=norm, **options)
        x = x if norm is None else rms_norm(x, norm.weight, norm.eps)
        inner = inner_products(x, bank, self._rows)
        add = partial(add_deltas, inner=inner, bank=bank, rows=self._rows)
        return super().gated(x, gate_up, add=add, **options)

    def _part(self, x: Tensor, linear: Linear, norm: RMSNorm | None) -> Tensor:
        bank = self._banks.get(linear)
        if bank is None:
            return super()._part(x, linear, norm)
        x = x if norm is None else rms_norm(x, norm.weight, norm.eps)
        part = super()._part(x, linear, None)
        add_deltas(part, inner_products(x, bank, self._rows), bank, self._rows)
        return part
