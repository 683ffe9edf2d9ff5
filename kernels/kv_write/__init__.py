"""Writes new keys and values into the paged cache."""

from torch import Tensor

from kernels.kv_codes import quantize


def kv_write(
    kv_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """Writes key [T, H_kv, D] and value [T, H_kv, value_dim] to the entries ``slot_mapping`` [T]
    int64.

    kv_cache is [num_blocks + 1, block_size, 2, H_kv, ≥ D]; entry = block * block_size + offset. The
    last block is the null block, and several tokens may write one of its entries. With
    ``kv_scales`` [num_blocks + 1, block_size, 2, H_kv] float32 the cache is quantized
    (``kv_codes``). torch serves every device.
    """
    block_size = kv_cache.shape[1]
    entries = slot_mapping // block_size, slot_mapping % block_size
    for place, numbers in enumerate((key, value)):
        stored = numbers
        if kv_scales is not None:
            stored, scales = quantize(numbers, kv_cache.dtype)
            kv_scales[:, :, place].index_put_(entries, scales)
        kv_cache[:, :, place, :, : stored.shape[2]].index_put_(entries, stored)
