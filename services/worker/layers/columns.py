"""The columns of a short convolution in the KV cache."""

from typing import NamedTuple

from torch import nn


class Columns(NamedTuple):
    """A token has a column in ``num_parts`` caches of the context, from ``layer`` on, with ``part``
    numbers each, in the blocks of a ``group``. ``weight`` [size, width], ``bias`` [size]."""

    layer: int
    num_parts: int
    part: int
    weight: nn.Parameter
    bias: nn.Parameter | None
    group: int = 0
