"""The paged KV cache."""

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.memory import ALIGNMENT, huge_zeros
from kernels.kv_layout import KVLayout, LayerKV


class KVCache:
    """The layers' cache entries of tokens, in blocks that the scheduler hands out.

    A block has a section for each of ``layouts``; one allocation has all blocks' first sections,
    then their second ones, and so on. ``layers`` has the memory of each layer: of the section in
    ``sections``, or of its own. The last block is the null block: block tables are padded with it,
    and tokens without a reserved block write to it. ``dtype`` is the dtype of the layers' inputs
    and outputs.
    """

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        sections: Sequence[int] | None = None,
    ) -> None:
        shape = num_blocks + 1, block_size
        token_bytes = [size for each in layouts for size in (each.entry_bytes, each.scales_bytes)]
        sizes = [math.prod(shape) * size for size in token_bytes]
        ends = list(accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
        memory = _zeros(ends[-1], device)
        starts = zip([0, *ends[:-1]], sizes, strict=True)
        parts = iter([memory[start : start + size] for start, size in starts])
        self.sections = []
        for layout in layouts:
            entries, scales = next(parts).view(layout.stored), next(parts).view(torch.float32)
            self.sections.append(
                LayerKV(
                    entries.view(*shape, *layout.stored_entry),
                    scales.view(*shape, *layout.scales_shape) if layout.codes else None,
                )
            )
        self.layers = [self.sections[each] for each in sections or range(len(layouts))]
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
                section.clear(places)

    def clear_slots(self, slots: Tensor) -> None:
        """Zeroes single ``slots`` [N] int64, block · block_size + offset, in all sections."""
        for section in self.sections:
            section.clear_slots(slots)


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes] uint8. On a CPU in huge pages that are zeroed when they are first written."""
    if device.type == "cpu":
        return huge_zeros(num_bytes)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
