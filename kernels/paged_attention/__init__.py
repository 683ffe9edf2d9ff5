"""Attention of the tokens of one step over keys and values in a paged cache.

Decode rows and prefill chunks share a call. On the host, ``AttentionBatch`` is prepared once a
step, and every layer calls ``paged_attention``, torch's fused attention, with it. Steps with row
lengths known only to the device use ``attend`` with ``DeviceAttention``.
"""

from torch import Tensor

from kernels.dispatch import runs_triton
from kernels.paged_attention import gathered
from kernels.paged_attention.batch import AttentionBatch, prepare_attention
from kernels.paged_attention.device import (
    TILE,
    ChunkRows,
    DecodeRows,
    DeviceAttention,
    make_tiles,
)
from kernels.paged_attention.grouped import PLAIN, AttentionOptions, paged_attention

__all__ = [
    "PLAIN",
    "TILE",
    "AttentionBatch",
    "AttentionOptions",
    "ChunkRows",
    "DecodeRows",
    "DeviceAttention",
    "attend",
    "make_tiles",
    "paged_attention",
    "prepare_attention",
]


def attend(
    query: Tensor,
    kv_cache: Tensor,
    attention: AttentionBatch | DeviceAttention,
    scale: float,
    options: AttentionOptions = PLAIN,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """query [T, H, D], kv_cache [num_blocks + 1, block_size, 2, H_kv, ≥ D] → [T, H, value_dim].

    The T tokens' own keys and values are in the cache already. If the dimension of 2 is 1, the
    first ``value_dim`` elements of a key are its value. With ``kv_scales`` [num_blocks + 1,
    block_size, 2, H_kv] float32, or [num_blocks + 1, block_size, 1, 1, num_groups] of latents, the
    cache is quantized (``kv_codes``). A DeviceAttention requires contiguous tensors.
    """
    if isinstance(attention, AttentionBatch):
        return paged_attention(query, kv_cache, attention, scale, options, kv_scales)
    if not runs_triton(query):
        return gathered.attend(query, kv_cache, attention, scale, options, kv_scales)
    from kernels.paged_attention import triton

    return triton.attend(query, kv_cache, attention, scale, options, kv_scales)
