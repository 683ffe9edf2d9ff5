"""Checkpoints of tools that store a layer as ``weight`` and ``weight_scale``."""

from collections.abc import Mapping
from typing import Any

import torch

from services.worker.weights.schemes.scheme import Scheme, Stored


class Scaled(Scheme):
    """``weight`` [outputs, inputs] of codes in eight bits, or [outputs, inputs / 2] uint8 of pairs
    of codes in four."""

    def holds(self, stored: Stored) -> bool:
        return "weight_scale" in stored

    def shape(self, stored: Stored) -> list[int]:
        codes = stored["weight"]
        outputs, num = codes.shape
        return [outputs, 2 * num if codes.dtype == torch.uint8 else num]


def as_mapping(value: Any, key: str) -> Mapping[str, Any]:
    """Returns ``value``, which a config has at ``key``. Raises ValueError for another type."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} {value!r} is not a JSON object")
    return value


def layers_of(config: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The configs of layers at ``key``, if any. Raises ValueError for another type."""
    layers = config.get(key)
    named = {} if layers is None else as_mapping(layers, key)
    return [as_mapping(each, f"{key}: {name}:") for name, each in named.items()]
