"""What is around attention to latents (arXiv 2405.04434), whose cache has one row of numbers for a
token: the latent [rank] and behind it the key [rope_dim] that all heads share.

A head's key is not made of the latent. What would make it, U [nope_dim, rank], is multiplied with
the query, and what would make its value, V [value_dim, rank], with the sum of latents that the head
attended to: one row of the cache is the key of all heads, and its beginning their value.
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
) -> None:
    """latent [T, rank + rope_dim], which is normed in its first part and rotated in the other by
    rotation [2, T, rope_dim] float32, goes to the entries ``slot_mapping`` [T] int64 of kv_cache
    [num_blocks + 1, block_size, 1, 1, rank + rope_dim]."""
    arguments = latent, norm, rotation, slot_mapping, kv_cache, is_interleaved
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
