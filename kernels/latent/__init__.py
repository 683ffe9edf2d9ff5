"""Operators around multi-head latent attention (arXiv 2405.04434). The cache has one row per token:
the latent [rank], then the key [rope_dim] shared by all heads.

Keys and values of heads are never materialized. The key projection U [nope_dim, rank] is applied to
the query, and the value projection V [value_dim, rank] to the attended sum of latents. A cache row
is thus the key of all heads, and its beginning their value.
"""

from torch import Tensor

from kernels.dispatch import runs_triton
from kernels.latent import plain
from kernels.rms_norm import Norm


def write_latents(
    latent: Tensor,
    norm: Norm,
    rotation: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    is_interleaved: bool,
    kv_scales: Tensor | None = None,
) -> None:
    """Writes latent [T, rank + rope_dim] to the entries ``slot_mapping`` [T] int64 of kv_cache
    [num_blocks + 1, block_size, 1, 1, rank + rope_dim]. The first part is normed, the rest rotated
    by rotation [2, T, rope_dim] float32. With ``kv_scales`` [num_blocks + 1, block_size, 1, 1,
    num_groups] float32 the first part is quantized (``kv_codes.latents``)."""
    arguments = latent, norm, rotation, slot_mapping, kv_cache, is_interleaved, kv_scales
    if not runs_triton(latent):
        return plain.write_latents(*arguments)
    from kernels.latent import triton

    return triton.write_latents(*arguments)


def latent_queries(query: Tensor, keys: Tensor, rotation: Tensor, is_interleaved: bool) -> Tensor:
    """query [T, H * (nope_dim + rope_dim)], keys [H, nope_dim, rank] → [T, H, rank + rope_dim]."""
    if not runs_triton(query):
        return plain.latent_queries(query, keys, rotation, is_interleaved)
    from kernels.latent import triton

    return triton.latent_queries(query, keys, rotation, is_interleaved)


def latent_values(attended: Tensor, values: Tensor) -> Tensor:
    """attended [T, H, rank], values [H, value_dim, rank] → [T, H * value_dim]."""
    if not runs_triton(attended):
        return plain.latent_values(attended, values)
    from kernels.latent import triton

    return triton.latent_values(attended, values)
