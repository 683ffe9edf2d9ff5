"""The adapters of a worker's sequences: packed for the backend, bound to indices while in use."""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from kernels.adapt import Change
from kernels.adapt.layout import Layout, lay_out
from kernels.cpu.adapter import bits_of
from services.worker.adapters.sites import LoadedAdapter, LowRank, Part, Site, layer_shapes
from services.worker.layers.parallel import Rows
from services.worker.startup.additions import PlanPart
from services.worker.step.batch import Batch
from shared.wire.codec import Array
from shared.wire.envelope import read_options
from shared.wire.messages import StepPlan

P = TypeVar("P")
NONE = -1  # the index of no adapter


class AdapterMissing(Exception):
    """A plan admits a sequence with an adapter that is not in the table."""


class Form(Protocol[P]):
    """How a backend keeps adapters."""

    def pack(self, changes: Sequence[Sequence[Change]]) -> P:
        """``changes`` of each site. On any thread, without threads of its own."""

    def bind(self, index: int, adapter: P | None) -> None:
        """No token of a pass has the adapter that ``index`` had before."""


class HostForm(Form[P], Protocol[P]):
    """Of a backend whose passes the host lays out."""

    def lay_out(self, layout: Layout | None) -> None:
        """The tokens of the next pass; None: they have no adapters."""

    def lay_out_logits(self, layout: Layout | None) -> None:
        """The rows of the next logits."""


class DeviceForm(Form[P], Protocol[P]):
    """Of a device, which knows the slots of a pass."""

    def assign(self, of_slots: np.ndarray) -> None:
        """``of_slots`` [num_slots] int64: the indices of the next passes' slots, or ``NONE``. A
        plan for the memory may leave fewer slots than the settings have."""


class AdapterTable(PlanPart, Generic[P]):
    """A plan part. At most ``max_adapters`` adapters are bound at a time, each up to ``max_rank``.
    ``is_open`` [num_slots] bool are the slots whose sequences run.

    Adapters are added and removed on any thread. A bound adapter stays until its index is free.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        form: Form[P],
        is_open: np.ndarray,
        *,
        max_adapters: int,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        self._sites = sites
        self._shapes = layer_shapes([*sites])
        self._form = form
        self._is_open = is_open
        self._max_rank, self._dtype = max_rank, dtype
        self._lock = Lock()
        self._adapters: dict[str, P] = {}  # by digest
        self._bound: list[str | None] = [None] * max_adapters  # digests by index
        self._of_slots = np.full(len(is_open), NONE)

    def __contains__(self, digest: str) -> bool:
        return digest in self._adapters

    def add(self, adapter: LoadedAdapter) -> None:
        """Packs ``adapter`` on the calling thread; then plans may have it. Raises ValueError if it
        does not fit the model."""
        self._check(adapter.layers)
        packed = self._form.pack([_changes_of(site, adapter.layers) for site in self._sites])
        with self._lock:
            self._adapters[adapter.digest] = packed

    def remove(self, digest: str) -> None:
        """No sequence that runs has it, and no later plan admits one. Its memory is freed by the
        next plan, if it was in use before."""
        with self._lock:
            self._adapters.pop(digest, None)

    def apply(self, plan: StepPlan, pixels: Sequence[Array] = ()) -> None:
        """Binds the adapters of admitted sequences. Raises AdapterMissing, or ValueError for too
        many adapters."""
        wanted = {row.slot: read_options(row.options).adapter for row in plan.admit}
        with self._lock:
            adapters = self._adapters.copy()
        digests = {digest: None for digest in wanted.values() if digest}
        for digest in digests:
            if digest not in adapters:
                raise AdapterMissing(f"adapter {digest} is not loaded")
        stays = self._is_open.copy()
        stays[[*plan.release, *wanted]] = False
        used = {*self._of_slots[stays].tolist()} - {NONE}
        indices = self._place(digests, used)
        for index, bound in enumerate(self._bound):
            if bound is not None and bound not in adapters and index not in used:
                self._bind(index, None, None)
        for digest, index in indices.items():
            if self._bound[index] != digest:
                self._bind(index, digest, adapters[digest])
        self._of_slots[plan.release] = NONE
        for slot, digest in wanted.items():
            self._of_slots[slot] = indices[digest] if digest else NONE

    def reset(self) -> None:
        self._of_slots[:] = NONE

    def _place(self, digests: Mapping[str, None], used: set[int]) -> dict[str, int]:
        """The index of each of ``digests``. An adapter keeps its index; others get the index of
        none, or of one that is not ``used``."""
        places = {
            digest: index
            for index, digest in enumerate(self._bound)
            if digest is not None and digest in digests
        }
        taken = used | {*places.values()}
        free = [index for index in range(len(self._bound)) if index not in taken]
        free.sort(key=lambda index: self._bound[index] is not None)
        new = [digest for digest in digests if digest not in places]
        if len(new) > len(free):
            raise ValueError(
                f"max-loras: {len(taken) + len(new)} different adapters at once; the limit is"
                f" {len(self._bound)}"
            )
        return places | dict(zip(new, free, strict=False))

    def _bind(self, index: int, digest: str | None, adapter: P | None) -> None:
        self._form.bind(index, adapter)
        self._bound[index] = digest

    def _check(self, layers: Mapping[str, LowRank]) -> None:
        for name, (a, b) in layers.items():
            shape = self._shapes.get(name)
            if shape is None:
                raise ValueError(f"{name}: no layer of the model that adapters change")
            rank, (outputs, inputs) = len(a), shape
            if not 1 <= rank <= self._max_rank:
                raise ValueError(f"{name}: rank {rank}; max-lora-rank is {self._max_rank}")
            if a.shape != (rank, inputs) or b.shape != (outputs, rank):
                raise ValueError(
                    f"{name}: A {list(a.shape)} and B {list(b.shape)} for {inputs} inputs and"
                    f" {outputs} outputs"
                )
            if (a.dtype, b.dtype) != (self._dtype, self._dtype):
                raise ValueError(f"{name}: {a.dtype} and {b.dtype}; the model has {self._dtype}")


class HostTable(AdapterTable[P]):
    def __init__(self, sites: Sequence[Site], form: HostForm[P], *args: Any, **limits: Any) -> None:
        super().__init__(sites, form, *args, **limits)
        self._host_form = form

    def lay_out(self, batch: Batch) -> Batch:
        of_rows = self._of_slots[batch.rows.slots]
        has_some = bool((of_rows != NONE).any())
        self._host_form.lay_out(lay_out(of_rows[batch.token_rows]) if has_some else None)
        return batch

    def lay_out_logits(self, slots: np.ndarray) -> None:
        """``slots`` [S] int64 of the rows."""
        of_rows = self._of_slots[slots]
        has_some = bool((of_rows != NONE).any())
        self._host_form.lay_out_logits(lay_out(of_rows) if has_some else None)


class DeviceTable(AdapterTable[P]):
    def __init__(
        self, sites: Sequence[Site], form: DeviceForm[P], *args: Any, **limits: Any
    ) -> None:
        super().__init__(sites, form, *args, **limits)
        self._device_form = form

    def apply(self, plan: StepPlan, pixels: Sequence[Array] = ()) -> None:
        super().apply(plan, pixels)
        self._device_form.assign(self._of_slots)


def _changes_of(site: Site, layers: Mapping[str, LowRank]) -> list[Change]:
    """This rank's."""
    return [
        _change(part, *layers[name])
        for name, part in site.parts.items()
        if name in layers and not part.is_elsewhere
    ]


def _change(part: Part, a: Tensor, b: Tensor) -> Change:
    first, outputs, inputs, is_table = part
    a = a[:, inputs.start : inputs.start + inputs.num]
    if isinstance(outputs, Rows):
        rows = bits_of(b)[outputs.ids]  # by numpy, on this thread alone
        return Change(first, a, torch.from_numpy(rows).view(b.dtype), is_table)
    return Change(first, a, b[outputs.start : outputs.start + outputs.num], is_table)
