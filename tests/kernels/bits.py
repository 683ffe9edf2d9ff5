"""A token's result has the same bits in every batch."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kernels.linear import gated, linear
from kernels.rms_norm import Norm, rms_norm
from kernels.rope_kv import rope_kv
from tests.kernels.rotations import EPS, rotation_table

Compute = Callable[[int], Tensor]  # for the given number of first rows
# (fused operators) of ``linear``; "gated" is the other operator
KINDS: dict[str, set[str]] = {
    "plain": set(),
    "norm": {"norm"},
    "bias": {"bias"},
    "residual": {"residual"},
    "all": {"norm", "bias", "residual"},
    "gated": {"gated", "norm"},
    "gated, bias": {"gated", "norm", "bias"},
    "logits": {"norm", "float32"},
}


def assert_rows_stand_alone(compute: Compute, num_rows: int, nums: Iterable[int]) -> None:
    whole = compute(num_rows)
    assert whole.isfinite().all()
    for num in nums:
        assert torch.equal(compute(num), whole[:num]), f"{num} of {num_rows}"


def products(
    kind: str, shape: tuple[int, int], max_rows: int, dtype: torch.dtype, device: torch.device
) -> Compute:
    """GEMMs with a weight [N, K] of that ``shape``."""
    num, size = shape
    terms = KINDS[kind]

    def normals(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, weight, residual = normals(max_rows, size), normals(num, size), normals(max_rows, num)
    weight /= size**0.5
    bias, norm = normals(num) if "bias" in terms else None, Norm(normals(size), EPS)
    if "gated" in terms:
        return lambda rows: gated(x[:rows], weight, bias, norm=norm)
    return lambda rows: linear(
        x[:rows],
        weight,
        bias,
        norm=norm if "norm" in terms else None,
        residual=residual[:rows].clone() if "residual" in terms else None,
        out_dtype=torch.float32 if "float32" in terms else None,
    )


def norms(size: int, max_rows: int, dtype: torch.dtype, device: torch.device) -> Compute:
    x, weight = torch.randn(max_rows, size).to(dtype), torch.randn(size).to(dtype)
    x, weight = x.to(device), weight.to(device)
    return lambda rows: rms_norm(x[:rows], weight, EPS)


def rotations(
    heads: tuple[int, int, int], max_rows: int, dtype: torch.dtype, device: torch.device
) -> Compute:
    """Queries, then the cached keys and values."""
    num_heads, num_kv_heads, head_dim = heads
    whole = torch.randn(max_rows, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype).to(device)
    query_norm, key_norm = (
        Norm((torch.rand(head_dim) + 0.5).to(dtype).to(device), EPS) for _ in range(2)
    )
    table = rotation_table(max_rows, head_dim, False).to(device)
    positions = torch.arange(max_rows, device=device)

    def rotate(rows: int) -> Tensor:
        cache = torch.zeros(max_rows, 1, 2, num_kv_heads, head_dim, dtype=dtype, device=device)
        slot_mapping = positions[:rows]
        rotation = table[:, :rows].contiguous()
        norms = query_norm, key_norm
        query = rope_kv(whole[:rows], *norms, rotation, slot_mapping, cache, False)
        return torch.cat((query.flatten(1), cache[:rows].flatten(1)), 1)

    return rotate
