"""Layers that keep something of earlier tokens, in the KV cache or in a state."""

from abc import ABC, abstractmethod

import torch
from torch import nn

from kernels.kv_layout import KVLayout
from services.worker.machine.kv_groups import KVSpec
from services.worker.machine.state_pool import StateSpec


class Keeping(nn.Module, ABC):
    """``number`` is the layer's in the model; ``numbers_per_token`` counts the numbers that a step
    holds of a token."""

    number: int

    @property
    @abstractmethod
    def numbers_per_token(self) -> int: ...


class Cached(Keeping):
    """A layer with a part of the KV cache."""

    @property
    def num_scored_heads(self) -> int:
        """The number of heads with features that torch's fused attention does not support."""
        return 0

    @property
    @abstractmethod
    def group(self) -> int: ...

    @property
    @abstractmethod
    def kv_spec(self) -> KVSpec: ...

    def kv_layout(self, dtype: torch.dtype, codes: torch.dtype | None) -> KVLayout:
        return KVLayout(self.kv_spec.entry, dtype, codes)

    @abstractmethod
    def put_cache(self, place: int, group: int) -> None:
        """Gives its KV cache a place in the context, and the blocks of a group of layers."""


class Stateful(Keeping):
    """A layer with a state of each sequence."""

    state_spec: StateSpec

    @abstractmethod
    def put_state(self, place: int) -> None:
        """Gives its states a place in the context."""
