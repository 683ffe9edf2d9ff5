"""Reference of ``adapt``."""

from collections.abc import Sequence

from torch import Tensor

from kernels.adapt import Change


def adapt(
    y: Tensor, x: Tensor, adapters: Tensor, changes: Sequence[Sequence[Change]], scale: float = 1.0
) -> Tensor:
    """y [T, N] + scale · B (A x) in float64, token by token. A x is rounded to x's dtype."""
    found = y.double().clone()
    for token, index in enumerate(adapters.tolist()):
        if index < 0:
            continue
        for first, a, b, is_table in changes[index]:
            inner = (a.double() @ x[token].double()).to(x.dtype)
            if is_table:
                inner = a[:, int(x[token])]
            found[token, first : first + len(b)] += scale * (b.double() @ inner.double())
    return found
