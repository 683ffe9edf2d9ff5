"""The paged KV cache."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.memory import ALIGNMENT, huge_zeros
from services.worker.layers.kv_layout import KVLayout


class KVCache:
    """What layers keep of tokens, in blocks that the scheduler hands out.

    ``layers`` has [num_blocks + 1, block_size, *entry] for each of ``layouts``, one behind the
    other in one allocation. The last block is the null block: block tables are padded with it, and
    tokens without a reserved block write to it.
    """

    def __init__(
        self, layouts: Sequence[KVLayout], num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        sizes = [(num_blocks + 1) * block_size * layout.num_bytes for layout in layouts]
        ends = list(accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
        memory = _zeros(ends[-1], device)
        self.layers = [
            memory[start : start + size]
            .view(layout.dtype)
            .view(num_blocks + 1, block_size, *layout.entry)
            for layout, start, size in zip(layouts, [0, *ends[:-1]], sizes, strict=True)
        ]
        self.null_block = num_blocks
        self.block_size = block_size

    def clear(self, blocks: np.ndarray) -> None:
        """Zeroes ``blocks`` [N] int64 that come into new hands, in all layers.

        Attention multiplies what it masks by 0, and NaN, the former owner's, would survive that.
        """
        if len(blocks):
            places = torch.from_numpy(blocks).to(self.layers[0].device)
            for layer in self.layers:
                layer.index_fill_(0, places, 0)

    def clear_slots(self, slots: Tensor) -> None:
        """Zeroes single ``slots`` [N] int64, block · block_size + offset, in all layers."""
        for layer in self.layers:
            layer.flatten(0, 1).index_fill_(0, slots, 0)


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes] uint8. On a CPU in huge pages that are zeroed when they are first written."""
    if device.type == "cpu":
        return huge_zeros(num_bytes)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
