"""Adapters in a step on a device, whose rows have the adapters of their slots. The host needs no
lengths, so that the operators can be captured in a graph."""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.adapt.bank import AdapterRows, Bank
from kernels.dispatch import runs_triton
from kernels.paged_attention.device import flat_rows


def inner_products(x: Tensor, bank: Bank, rows: AdapterRows) -> Tensor:
    """A x of each row's adapter: x [T, K] → [S, P, T, R] float32, the sums of S splits of inputs.
    Those of rows without one have no meaning."""
    if runs_triton(x):
        from kernels.adapt.triton import launch_inner

        return launch_inner(x, bank, rows)
    _, rank, num_parts, _ = bank.a.shape
    found = x.new_zeros(1, num_parts, len(x), rank, dtype=torch.float32)
    for of_tokens, a in zip(_of_adapters(rows, len(x), len(bank.a)), bank.a, strict=True):
        inner = functional.linear(x.float(), a.flatten(0, 1).float())
        by_part = inner.view(len(x), rank, num_parts).permute(2, 0, 1)
        found[0] = torch.where(of_tokens[:, None], by_part, found[0])
    return found


def add_deltas(y: Tensor, inner: Tensor, bank: Bank, rows: AdapterRows, scale: float = 1.0) -> None:
    """y += scale · B (A x) of each row's adapter, in place: y [T, N]. A x, the sum of ``inner``, is
    rounded to B's dtype; the sums of B and the addition are in float32."""
    if runs_triton(y):
        from kernels.adapt.triton import launch_deltas

        launch_deltas(y, inner, bank, rows, scale)
        return
    rounded = inner.sum(0).to(bank.b.dtype).float()
    parts = _parts(bank)
    for of_tokens, b in zip(_of_adapters(rows, len(y), len(bank.b)), bank.b, strict=True):
        deltas = [rounded[part] @ b[:, first:end].float() for part, first, end in parts]
        wide = y.float() + torch.cat(deltas, 1) * scale
        y.copy_(torch.where(of_tokens[:, None], wide.to(y.dtype), y))


def _parts(bank: Bank) -> list[tuple[int, int, int]]:
    """Each part with its first output and its end."""
    found: dict[int, tuple[int, int, int]] = {}
    for part, first, end in bank.blocks.tolist():
        found.setdefault(part, (part, first, end))
    return [*found.values()]


def _of_adapters(rows: AdapterRows, num_tokens: int, num_adapters: int) -> list[Tensor]:
    """[T] bool for each adapter: the tokens that have it."""
    flat = flat_rows(rows.decode, rows.chunks, num_tokens)
    slots = flat.slots.index_select(0, flat.token_rows)
    of_tokens = rows.of_slots.index_select(0, slots)
    return [of_tokens == index for index in range(num_adapters)]
