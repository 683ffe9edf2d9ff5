"""Reference of ``short_conv``: token by token, in a flat list of entries."""

import torch
from torch import Tensor


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor
) -> tuple[Tensor, Tensor]:
    """x [T, 3 · size] of one sequence, whose earlier entries are ``before`` [P, size] → the output
    [T, size], and all entries [P + T, size] in the dtype of ``before``."""
    size, width = weight.shape
    entries, outputs = list(before), []
    for token in x:
        b, c, u = token[:size], token[size : 2 * size], token[2 * size :]
        entries.append((b * u).to(before.dtype))
        last = entries[-width:]
        total = torch.zeros(size)
        for column, entry in enumerate(last, width - len(last)):
            total += weight[:, column].float() * entry.float()
        if bias is not None:
            total += bias.float()
        outputs.append((c.float() * total).to(x.dtype))
    return torch.stack(outputs), torch.stack(entries)
