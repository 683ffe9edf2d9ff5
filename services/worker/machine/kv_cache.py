"""The paged KV cache."""

import math

import numpy as np
import torch

from kernels.cpu.memory import huge_zeros
from services.worker.config.model_shape import ModelShape


class KVCache:
    """Keys and values of ``num_layers``, in blocks that the scheduler hands out.

    ``layers`` has [num_blocks + 1, block_size, 2, num_kv_heads, head_dim] for each. The last block
    is the null block: block tables are padded with it, and tokens without a reserved block write to
    it.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        entry = (2, shape.num_key_value_heads, shape.head_dim)
        self._all = _zeros((num_layers, num_blocks + 1, block_size, *entry), dtype, device)
        self.layers = self._all.unbind()
        self.block_size = block_size

    def clear(self, blocks: np.ndarray) -> None:
        """Zeroes ``blocks`` [N] int64 that come into new hands, in all layers.

        Attention multiplies what it masks by 0, and NaN, the former owner's, would survive that.
        """
        if len(blocks):
            self._all.index_fill_(1, torch.from_numpy(blocks).to(self._all.device), 0)

    def clear_slots(self, slots: torch.Tensor) -> None:
        """Zeroes single ``slots`` [N] int64, block · block_size + offset, in all layers."""
        self._all.flatten(1, 2).index_fill_(1, slots, 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU, huge pages that the kernel hands out zeroed when they are first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return huge_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
