"""The entry of a token in a layer's KV cache."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.kv_codes.latents import entry_size, num_groups


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A token's entry in the KV cache of one layer: ``entry`` is (2, H_kv, D) for keys and values
    of heads, (1, 1, D) for a latent and its key, or has a 0 if the layer keeps nothing. With
    ``codes`` (``kernels.kv_codes``) it holds codes instead of numbers of ``dtype``, and each head's
    key and value has a scale; of a latent with ``rank`` numbers, groups have scales."""

    entry: tuple[int, ...]
    dtype: torch.dtype
    codes: torch.dtype | None = None
    rank: int | None = None

    @property
    def stored(self) -> torch.dtype:
        return self.codes or self.dtype

    @property
    def stored_entry(self) -> tuple[int, ...]:
        if self.codes is None or self.rank is None:
            return self.entry
        return 1, 1, entry_size(self.rank, self.entry[-1] - self.rank, self.dtype)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        if self.codes is None:
            return (0,)
        return self.entry[:-1] if self.rank is None else (1, 1, num_groups(self.rank))

    @property
    def entry_bytes(self) -> int:
        return math.prod(self.stored_entry) * self.stored.itemsize

    @property
    def scales_bytes(self) -> int:
        return math.prod(self.scales_shape) * torch.float32.itemsize

    @property
    def num_bytes(self) -> int:
        return self.entry_bytes + self.scales_bytes


class LayerKV(NamedTuple):
    """The KV cache of one layer. Other layers may use the memory between its blocks. Native code
    lays both tensors out in its own way."""

    entries: Tensor  # [num_blocks + 1, block_size, *KVLayout.stored_entry]
    scales: Tensor | None = None  # of codes: [num_blocks + 1, block_size, *scales_shape] float32

    def clear(self, blocks: Tensor) -> None:
        """Zeroes ``blocks`` [N] int64."""
        for tensor in self._tensors:
            tensor.index_fill_(0, blocks, 0)

    def clear_slots(self, slots: Tensor) -> None:
        """Zeroes single ``slots`` [N] int64, block · block_size + offset."""
        for tensor in self._tensors:
            size = tensor.shape[1]
            tensor[slots // size, slots % size] = 0

    @property
    def _tensors(self) -> list[Tensor]:
        return [tensor for tensor in self if tensor is not None]
