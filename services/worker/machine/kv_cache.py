"""The paged KV cache."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.memory import ALIGNMENT, huge_zeros
from kernels.kv_layout import KVLayout, LayerKV
from services.worker.machine.kv_groups import Place, pack


class KVCache:
    """The layers' cache entries of tokens, in blocks that the scheduler hands out.

    ``layers`` has the memory of each of ``layouts`` in every block, as ``pack`` places them by
    their ``groups``, by default one. One allocation has all blocks' first ``sections``, then their
    second ones, and so on; scales have sections of their own. The last block is the null block:
    block tables are padded with it, and tokens without a reserved block write to it. ``dtype`` is
    the dtype of the layers' inputs and outputs.
    """

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        groups: Sequence[int] | None = None,
    ) -> None:
        self._groups = groups or [0] * len(layouts)
        entries = pack([block_size * each.entry_bytes for each in layouts], self._groups)
        scales = pack([block_size * each.scales_bytes for each in layouts], self._groups)
        self.sections = _sections([*entries.sections, *scales.sections], num_blocks + 1, device)
        of_scales = self.sections[len(entries.sections) :]
        self.layers = [
            LayerKV(
                _view(self.sections, entry, layout.stored, (block_size, *layout.stored_entry)),
                _view(of_scales, scale, torch.float32, (block_size, *layout.scales_shape))
                if layout.codes
                else None,
            )
            for layout, entry, scale in zip(layouts, entries.places, scales.places, strict=True)
        ]
        self.dtype = layouts[0].dtype
        self.device = device
        self.null_block = num_blocks
        self.block_size = block_size

    def clear(self, blocks: np.ndarray) -> None:
        """Zeroes ``blocks`` [N] int64, before a new owner gets them, in all sections.

        Attention multiplies masked values by 0, and a NaN of the former owner would survive that.
        """
        if len(blocks):
            places = torch.from_numpy(blocks).to(self.device)
            for section in self.sections:
                section.index_fill_(0, places, 0)

    def clear_slots(self, slots: Sequence[Tensor]) -> None:
        """Zeroes single slots [N] int64, block · block_size + offset, of each group of layers."""
        for group, layer in zip(self._groups, self.layers, strict=True):
            layer.clear_slots(slots[group])


def _sections(sizes: Sequence[int], num_blocks: int, device: torch.device) -> list[Tensor]:
    """[num_blocks, size] uint8 each."""
    ends = list(accumulate(-(-num_blocks * size // ALIGNMENT) * ALIGNMENT for size in sizes))
    memory = _zeros(ends[-1], device)
    starts = zip([0, *ends[:-1]], sizes, strict=True)
    return [memory[at : at + num_blocks * size].view(num_blocks, size) for at, size in starts]


def _view(
    sections: Sequence[Tensor], place: Place, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """A layer's part of a section: [blocks, *shape]"""
    part = sections[place.section][:, place.start : place.start + place.size]
    if not place.size:
        return part.new_empty(len(part), *shape, dtype=dtype)
    return torch.unflatten(part.view(dtype), 1, shape)


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes] uint8. On a CPU in huge pages that are zeroed when they are first written."""
    if device.type == "cpu":
        return huge_zeros(num_bytes)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
