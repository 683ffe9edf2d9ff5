"""The ambient context of one forward pass: inputs of attention that model code does not pass on.

The only ambient global. Prepared once a step and read by every layer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kernels.delta.device import DeviceStates
from kernels.delta.states import States
from kernels.kv_layout import LayerKV
from kernels.paged_attention import AttentionBatch, DeviceAttention


class AttentionInputs(NamedTuple):
    """The blocks of a step's T tokens in one group of layers, which share block tables."""

    slot_mapping: Tensor  # [T] int64: block * block_size + offset that a token's KV goes to
    attention: AttentionBatch | DeviceAttention


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """T tokens of a step, flattened over its rows. Models with states have ``states``."""

    kv_caches: Sequence[LayerKV]  # one for each layer
    groups: Sequence[AttentionInputs]  # one for each group of layers
    states: States | DeviceStates | None = None


_current: ForwardContext | None = None


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    global _current
    _current = context
    try:
        yield
    finally:
        _current = None


def current_context() -> ForwardContext:
    """The context of the forward pass that runs; RuntimeError outside of one."""
    if _current is None:
        raise RuntimeError("no forward pass is running")
    return _current
