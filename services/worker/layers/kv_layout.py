"""What a layer keeps of each token that it has seen."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A token's entry in the KV cache of one layer: ``entry`` is (2, H_kv, D) for keys and values
    of heads, or has a 0 where the layer keeps nothing."""

    entry: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.entry) * self.dtype.itemsize
