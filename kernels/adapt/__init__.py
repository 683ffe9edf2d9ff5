"""Adapters: changes B A of products, for the tokens of a step that have one (arXiv 2106.09685)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Change(NamedTuple):
    """B A of the outputs first … first + n - 1 of a product: a [r, K], b [n, r]. With a table the
    inputs are ids, whose columns of A are looked up."""

    first: int
    a: Tensor
    b: Tensor
    is_table: bool = False


class Adapted(NamedTuple):
    """Rows x [n, K], or ids [n], of the ``tokens`` [n] int64 with one adapter, and its changes,
    whose outputs do not overlap."""

    tokens: Tensor
    x: Tensor
    changes: Sequence[Change]


def add_deltas(y: Tensor, adapted: Sequence[Adapted], scale: float = 1.0) -> None:
    """y[tokens] += scale · B (A x), in place: y [T, N].

    A x is rounded to x's dtype. The sums of B and the addition are in float32.
    """
    for tokens, x, changes in adapted:
        wide = y.index_select(0, tokens).float()
        for first, a, b, is_table in changes:
            inner = (a.T[x.long()] if is_table else functional.linear(x.to(a.dtype), a)).float()
            wide[:, first : first + len(b)] += functional.linear(inner, b.float()) * scale
        y.index_copy_(0, tokens, wide.to(y.dtype))


def adapt(
    y: Tensor, x: Tensor, adapters: Tensor, changes: Sequence[Sequence[Change]], scale: float = 1.0
) -> None:
    """The same for x [T, K], where ``adapters`` [T] int64 has each token's index in ``changes``,
    or −1."""
    for index, each in enumerate(changes):
        tokens = torch.nonzero(adapters == index).flatten()
        if len(tokens) and each:
            add_deltas(y, [Adapted(tokens, x.index_select(0, tokens), each)], scale)
