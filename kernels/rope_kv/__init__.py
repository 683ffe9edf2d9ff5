"""The operators between the QKV projection and attention: norms of the heads (if the model has
them), rotary positions, and writing keys and values to the cache."""

from torch import Tensor

from kernels.dispatch import runs_triton
from kernels.rms_norm import Norm
from kernels.rope_kv import plain


def rope_kv(
    heads: Tensor,
    query_norm: Norm | None,
    key_norm: Norm | None,
    rotation: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    is_interleaved: bool,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """heads [T, (H + 2 H_kv) * D], queries before keys before values → queries [T, H, D].

    Keys and values go to the entries ``slot_mapping`` [T] int64 of ``kv_cache`` [num_blocks + 1,
    block_size, 2, H_kv, D], and their scales to ``kv_scales``, as in ``kv_write``. Norms round to
    the heads' dtype before the rotation does. A norm of size D applies to each head; norms of size
    H * D and H_kv * D apply to all queries and all keys of a token together, always in torch.
    rotation [2, T, R] float32: cosines and signed sines (as in ``rope``) of the tokens; the first R
    ≤ D elements of a head are rotated.
    """
    arguments = rotation, slot_mapping, kv_cache, is_interleaved, kv_scales
    if not runs_triton(heads):
        return plain.rope_kv(heads, query_norm, key_norm, *arguments)
    if query_norm is not None and len(query_norm.weight) != kv_cache.shape[-1]:
        return plain.rope_kv(heads, query_norm, key_norm, *arguments).contiguous()
    from kernels.rope_kv import triton

    return triton.rope_kv(heads, query_norm, key_norm, *arguments)
