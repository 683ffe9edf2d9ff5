"""Layers with weights in host memory, as a model knows them."""

from typing import Protocol

from torch import nn


class Offloaded(Protocol):
    """Copies the weights of some of the trunk's layers to the device ahead of their turn."""

    @property
    def buffer_bytes(self) -> int:
        """The bytes of the buffers that the layers share on the device."""

    @property
    def weight_bytes(self) -> int:
        """The bytes of all tensors in the buffers."""

    def enter(self, layer: nn.Module) -> None:
        """Marks the next launches as ``layer``'s; every forward pass enters each layer of the
        trunk. Unfinished work of an earlier pass is forgotten."""
